"""What is read of a file, and what of it is learned."""

from __future__ import annotations

import json

import pytest
import torch
from support import finetune_inputs

from kvkeep.finetune.data import DataError, Tokens, batched, digest, order, pieces, read

BROKEN = "{{ messages[0].nowhere.at.all }}"
LOOKS_AHEAD = (
    "{% for m in messages %}{% if not loop.last or m['role'] == 'user' %}<s>{% endif %}"
    "{{ m['content'] }}<e>{% endfor %}"
)
FEWER_AT_FIRST = "{{ messages | length }}" + finetune_inputs.TEMPLATE


@pytest.fixture(scope="module")
def tokenizer():
    return finetune_inputs.tokenizer()


def learned(tokenizer, tokens):
    """The runs of learned tokens, as text."""
    found, last = [], False
    for token, label in zip(tokens.ids.tolist(), tokens.labels.tolist(), strict=True):
        assert label in (token, -100)
        if label != -100:
            found = found if last else [*found, []]
            found[-1].append(token)
        last = label != -100
    return [tokenizer.decode(run) for run in found]


def test_all_of_a_text_is_learned(tmp_path, tokenizer):
    (found,) = read(finetune_inputs.write(tmp_path / "d", "Some words.\nMore."), tokenizer)
    assert found.ids.tolist() == tokenizer("Some words.\nMore.").input_ids
    assert found.labels.equal(found.ids)
    assert found.learned == len(found.ids) - 1


def test_only_the_assistant_is_learned(tmp_path, tokenizer):
    system = [{"role": "system", "content": "Be."}, *finetune_inputs.CHAT]
    for found in read(
        finetune_inputs.write(tmp_path / "d", finetune_inputs.CHAT, system), tokenizer
    ):
        assert learned(tokenizer, found) == ["Hello.<e>\n", "Me.<e>\n"]
    whole = tokenizer.apply_chat_template(system, tokenize=False)
    assert tokenizer.decode(found.ids) == whole


def test_what_the_user_says_last_is_not_learned(tmp_path, tokenizer):
    (found,) = read(finetune_inputs.write(tmp_path / "d", finetune_inputs.CHAT[:3]), tokenizer)
    assert learned(tokenizer, found) == ["Hello.<e>\n"]
    assert tokenizer.decode(found.ids).endswith("Who?<e>\n")


def test_messages_with_calls_weights_and_empty_texts(tmp_path, tokenizer):
    """As OpenAI writes them."""
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"at": 3}'}}
    line = {
        "messages": [
            {"role": "system", "content": ""},
            {"role": "user", "content": "Where?"},
            {"role": "assistant", "content": "Unsure.", "weight": 0},
            {"role": "user", "content": "Look."},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": ""},
            {"role": "assistant", "content": "There.", "weight": 1},
        ],
        "tools": tools,
    }
    template = (
        "{% if tools %}[{{ tools[0].function.name }}]{% endif %}"
        "{% for m in messages %}<s>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}"
        "{{ c.function.name }}({{ c.function.arguments.at }}){% endfor %}<e>\n{% endfor %}"
        "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
    )
    file = finetune_inputs.write(tmp_path / "d", json.dumps(line).encode())
    (found,) = read(file, finetune_inputs.tokenizer(template))
    assert learned(tokenizer, found) == ["look(3)<e>\n", "There.<e>\n"]
    assert tokenizer.decode(found.ids).startswith("[look]<s>system")


def test_prompts_with_completions(tmp_path, tokenizer):
    user, *rest = finetune_inputs.CHAT
    lines = ({"prompt": "Who? ", "completion": "Me."}, {"prompt": [user], "completion": rest})
    file = finetune_inputs.write(tmp_path / "d", *(json.dumps(x).encode() for x in lines))
    text, chat = read(file, tokenizer)
    assert tokenizer.decode(text.ids) == "Who? Me."
    assert learned(tokenizer, text) == ["Me."]
    assert learned(tokenizer, chat) == ["Hello.<e>\n", "Me.<e>\n"]
    lines = [{"prompt": finetune_inputs.CHAT[:3], "completion": finetune_inputs.CHAT[3:]}]
    file = finetune_inputs.write(tmp_path / "e", json.dumps(lines[0]).encode())
    assert learned(tokenizer, read(file, tokenizer)[0]) == ["Me.<e>\n"]


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ({"content": "a", "weight": 0.5}, '"weight" of message 0 is 0.5; give 0 or 1'),
        ({"content": "a", "weight": 0}, 'every message of the assistant has "weight" 0'),
        ({"content": "a", "weights": 1}, "message 0 has unsupported keys: weights"),
        ({"content": "", "tool_calls": []}, "\"content\" of message 0 is ''"),
        ({"tool_calls": {"a": 1}}, '"tool_calls" of message 0 is'),
        ({"tool_calls": [{}]}, "a call of message 0 is {}"),
        (
            {"tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
            "a call of message 0 has arguments that are not JSON",
        ),
        ({"tool_calls": [{"function": {"name": "f", "arguments": [1]}}]}, r"arguments \[1\]"),
    ],
)
def test_bad_messages(tmp_path, tokenizer, message, says):
    line = json.dumps({"messages": [{"role": "assistant", **message}]}).encode()
    with pytest.raises(DataError, match=says):
        read(finetune_inputs.write(tmp_path / "d", line), tokenizer)


@pytest.mark.parametrize(
    ("template", "says"),
    [
        (LOOKS_AHEAD, "the text of message 1 depends on what follows"),
        (FEWER_AT_FIRST, "the text of message 1 depends on what follows"),
        (BROKEN, "chat template refuses the first 4 messages"),
        (None, "no chat template"),
    ],
)
def test_templates_whose_answers_cannot_be_found(tmp_path, template, says):
    file = finetune_inputs.write(tmp_path / "chats", "A text.", finetune_inputs.CHAT)
    with pytest.raises(DataError, match=f"chats, line 2: .*{says}"):
        read(file, finetune_inputs.tokenizer(template))


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b"words", "not JSON .*; write "),
        (b"", "not JSON"),
        (b'{"text": "caf\xe9"}', "not JSON .*utf-8"),
        (b"[" * 100_000, "not JSON"),
        (b"[]", r"\[\]; give an object"),
        (b'{"prompt": "a"}', r"an object of \['prompt'\]"),
        (b'{"text": "a", "messages": []}', 'either "text" or "messages"'),
        (b'{"text": "a", "labels": 1}', "not supported: labels"),
        (b'{"messages": [], "function": 1}', "not supported: function"),
        (b'{"prompt": "a", "completion": []}', "not both texts or both lists"),
        (b'{"prompt": "a", "completion": "b", "tools": [{}]}', '"tools" with texts'),
        (b'{"messages": [], "tools": 3}', '"tools" is 3'),
        (b'{"text": 3}', '"text" is 3'),
        (b'{"text": " "}', "\"text\" is ' '; give text that is not empty"),
        (b'{"text": "\\ud800"}', "half of a surrogate pair"),
        (b'{"messages": {}}', '"messages" is {}'),
        (b'{"messages": []}', r'"messages" is \[\]'),
        (b'{"messages": ["hi"]}', "message 0 is 'hi'"),
        (b'{"messages": [{"role": "user"}]}', '"content" of message 0 is None'),
        (b'{"messages": [{"role": 1, "content": "a"}]}', '"role" of message 0 is 1'),
        (b'{"messages": [{"role": "user", "content": "a"}]}', "no message of the assistant"),
    ],
)
def test_bad_lines(tmp_path, tokenizer, line, says):
    file = finetune_inputs.write(tmp_path / "texts", "Good.", line, "Good.")
    with pytest.raises(DataError, match=f"texts, line 2: .*{says}"):
        read(file, tokenizer)


def test_files_with_nothing(tmp_path, tokenizer):
    for content in (b"", b"\n"):
        (tmp_path / "d").write_bytes(content)
        with pytest.raises(DataError, match="d is empty; write"):
            read(tmp_path / "d", tokenizer)
    with pytest.raises(DataError, match=r"cannot read .*nowhere: No such file"):
        read(tmp_path / "nowhere", tokenizer)


def test_pieces(tmp_path, tokenizer):
    short, long, chat = read(
        finetune_inputs.write(tmp_path / "d", "a", "0123456789x", finetune_inputs.CHAT), tokenizer
    )
    assert pieces([short], 5) == []
    found = pieces([long], 5)
    assert [tokenizer.decode(piece.ids) for piece in found] == ["01234", "56789"]  # no single x
    assert all(piece.labels.equal(piece.ids) for piece in found)
    (whole,) = pieces([chat], 99)
    assert whole.ids.equal(chat.ids)
    # No answer is in the first eight tokens, and one whole piece has no more than its first.
    assert all(piece.learned for piece in pieces([chat], 8))
    assert 0 < len(pieces([chat], 8)) < len(chat.ids) / 8
    ids = torch.arange(6)
    only_the_first = torch.where(ids % 3 == 0, ids, -100)
    assert pieces([Tokens(ids, only_the_first)], 3) == []


def test_batches():
    long, short, last = (Tokens(torch.arange(1, n), torch.arange(1, n)) for n in (6, 4, 3))
    first, second = batched([long, short, last], 2)
    assert first.ids.tolist() == [[1, 2, 3, 4, 5], [1, 2, 3, 0, 0]]
    assert first.mask.tolist() == [[1] * 5, [1, 1, 1, 0, 0]]
    assert first.labels.tolist() == [[1, 2, 3, 4, 5], [1, 2, 3, -100, -100]]
    assert second.ids.tolist() == [[1, 2]]


def test_order():
    first = order(50, 0, 0)
    assert sorted(first) == list(range(50))
    torch.manual_seed(1)
    assert order(50, 0, 0) == first
    different = [first, order(50, 0, 1), order(50, 1, 0), list(range(50))]
    assert len({tuple(one) for one in different}) == 4


def test_a_digest_tells_apart():
    ids = torch.arange(6)
    whole = Tokens(ids, ids)
    cut = pieces([whole], 3)
    some = Tokens(ids, torch.where(ids > 2, ids, -100))
    assert digest([whole]) == digest([Tokens(ids.clone(), ids.clone())])
    assert len({digest(given) for given in ([], [whole], cut, cut[::-1], [some])}) == 5
