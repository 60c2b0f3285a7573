"""Probabilities, penalties and biases, against logits computed directly."""

from __future__ import annotations

import pytest
import torch
from support.live_server import asking, pieces, said, scripted

from kvkeep.host import host_of
from kvkeep.serve.token_names import TokenNames

CHAT = {"model": "tiny", "messages": asking("Hello.")}


@pytest.fixture
def greedy(served, tokenizer):
    """The greedy tokens after a prompt, with each one's logits, from forwards of one sequence; the
    logits may be changed."""

    @torch.inference_mode()
    def answer(ids, most, change=lambda logits, tokens: logits):
        host, tokens, all_logits = host_of(served[0].model), [], []
        cache, row = host.new_cache(), torch.tensor([ids])
        for _ in range(most):
            logits = host.forward(row, cache)[0, -1].float()
            row = change(logits.clone(), tokens).argmax()[None, None]
            tokens.append(int(row))
            all_logits.append(logits)
        return tokens, torch.stack(all_logits)

    return answer


@pytest.fixture
def ids(tokenizer):
    return tokenizer.apply_chat_template(
        CHAT["messages"], add_generation_prompt=True, return_dict=True
    ).input_ids


@pytest.fixture
def names(tokenizer):
    known = TokenNames(tokenizer)
    return lambda tokens: [known[token].text for token in tokens]


def test_logprobs_of_chats(served, names, greedy, ids):
    create = served[1].chat.completions.create
    tokens, logits = greedy(ids, 6)
    best = logits.log_softmax(-1).topk(3)
    options = {"temperature": 0, "max_tokens": 6, "logprobs": True, "top_logprobs": 3}
    answer = create(n=2, **CHAT, **options)
    for choice in answer.choices:
        content = choice.logprobs.content
        assert [one.token for one in content] == names(tokens)
        for i, one in enumerate(content):
            assert one.logprob == pytest.approx(float(best.values[i, 0]), abs=1e-4)
            others = [(other.token, other.logprob) for other in one.top_logprobs]
            assert [name for name, _ in others] == names(best.indices[i].tolist())
            assert [p for _, p in others] == pytest.approx(best.values[i].tolist(), abs=1e-4)
            assert one.token.startswith("bytes:") or bytes(one.bytes).decode() == one.token
    streamed = list(create(stream=True, **CHAT, **options))
    parts = [
        one
        for chunk in streamed
        for choice in chunk.choices
        for one in (choice.logprobs.content if choice.logprobs else ())
    ]
    assert [one.token for one in parts] == [one.token for one in content]
    assert [one.logprob for one in parts] == pytest.approx([one.logprob for one in content])
    assert "".join(pieces(streamed)[0]) == said(answer)
    assert create(**CHAT, max_tokens=2).choices[0].logprobs is None
    bare = create(**CHAT, temperature=0, max_tokens=6, logprobs=True).choices[0].logprobs.content
    assert [one.logprob for one in bare] == pytest.approx([one.logprob for one in content])
    assert not any(one.top_logprobs for one in bare)


def test_logprobs_of_completions(served, names, greedy):
    create = served[1].completions.create
    prompt = [5, 17, 300]
    tokens, logits = greedy(prompt, 5)
    logprobs = logits.log_softmax(-1)
    options = {"model": "tiny", "prompt": prompt, "temperature": 0, "max_tokens": 5}
    whole = create(logprobs=2, **options).choices[0]
    found = whole.logprobs
    assert found.tokens == names(tokens)
    assert found.token_logprobs == pytest.approx(logprobs.amax(-1).tolist(), abs=1e-4)
    assert [max(top.values()) for top in found.top_logprobs] == found.token_logprobs
    assert found.text_offset == sorted(found.text_offset)
    for token, start in zip(found.tokens, found.text_offset, strict=True):
        assert "bytes:" in token or whole.text[start:].startswith(token)
    assert create(logprobs=0, **options).choices[0].logprobs.top_logprobs == [{}] * 5
    chunks = [chunk.choices[0] for chunk in create(logprobs=2, stream=True, **options)]
    assert [t for chunk in chunks if chunk.logprobs for t in chunk.logprobs.tokens] == found.tokens


@pytest.mark.parametrize(
    ("presence", "frequency"), [(2.0, 0.0), (0.0, 1.5), (-2.0, -2.0), (0.5, 0.25)]
)
def test_penalties_are_of_the_answers_own_tokens(served, names, greedy, ids, presence, frequency):
    def change(logits, tokens):
        for token in set(tokens):
            logits[token] -= presence + frequency * tokens.count(token)
        return logits

    options = {"presence_penalty": presence, "frequency_penalty": frequency}
    answer = served[1].chat.completions.create(
        max_tokens=20, temperature=0, logprobs=True, **CHAT, **options
    )
    tokens, _ = greedy(ids, 20, change)
    found = [one.token for one in answer.choices[0].logprobs.content]
    assert found == names(tokens)
    if presence < 0:
        assert tokens != greedy(ids, 20)[0]


def test_biased_and_cut_choices(ask, greedy, tokenizer, ids):
    (first,), _ = greedy(ids, 1)
    assert said(ask(logit_bias={"1234": 100}, max_tokens=3)) == tokenizer.decode([1234] * 3)
    banned = ask(logit_bias={str(first): -100}, max_tokens=1, logprobs=True)
    assert banned.choices[0].logprobs.content[0].token != tokenizer.decode([first])
    warm = {"temperature": 2.0, "seed": 5, "max_tokens": 12}
    greedily = said(ask())
    assert said(ask(**warm)) != greedily
    assert said(ask(**warm, extra_body={"top_k": 1})) == greedily
    assert said(ask(**warm, extra_body={"min_p": 1.0})) == greedily


@pytest.mark.parametrize("form", ["text", "ids"])
def test_an_echoed_prompt_is_scored(served, tokenizer, form):
    """As lm-evaluation-harness asks: the prompts of a batch, each with one more token."""
    texts = ["The lighthouse was built in the year of the great storm. " * 30, "One, two"]
    prompts = [tokenizer(text).input_ids for text in texts]
    assert max(map(len, prompts)) > 300  # it is read in chunks
    options = {"model": "tiny", "temperature": 0, "logprobs": 1, "echo": True, "seed": 1}
    create = served[1].completions.create
    for most in (1, 0):
        given = texts if form == "text" else prompts
        answer = create(prompt=given, max_tokens=most, **options)
        assert answer.usage.prompt_tokens == sum(map(len, prompts))
        assert answer.usage.completion_tokens == 2 * most
        for choice, ids, text in zip(answer.choices, prompts, texts, strict=True):
            found = choice.logprobs
            with torch.inference_mode():
                logits = served[0].model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
            own = logits[:-1].gather(1, torch.tensor(ids)[1:, None])[:, 0]
            assert found.token_logprobs[0] is found.top_logprobs[0] is None
            prompt = found.token_logprobs[1 : len(ids)]
            assert prompt == pytest.approx(own.tolist(), abs=1e-4)
            best = [max(top.values()) for top in found.top_logprobs[1 : len(ids)]]
            assert best == pytest.approx(logits[:-1].amax(-1).tolist(), abs=1e-4)
            for token, top in zip(found.tokens[1:], found.top_logprobs[1:], strict=True):
                assert token in top
            assert len(found.tokens) == len(ids) + most
            assert choice.text.startswith(text)
            assert (choice.text == text) == (most == 0)
            for token, offset in zip(found.tokens, found.text_offset, strict=True):
                assert "bytes:" in token or choice.text[offset:].startswith(token)
    plain = create(model="tiny", prompt=texts[1], echo=True, max_tokens=4, temperature=0)
    chunks = list(create(prompt=texts, max_tokens=1, stream=True, **options))
    assert next(c.choices[0].text for c in chunks if c.choices[0].index == 1) == texts[1]
    assert plain.choices[0].text.startswith(texts[1])
    assert plain.choices[0].logprobs is None


def test_offsets_are_of_the_text_though_a_stop_string_is_held_back(served, tokenizer):
    text = " one two three four"
    options = {"model": "tiny", "prompt": "Count:", "logprobs": 0, "max_tokens": 20}
    with scripted(tokenizer, text):
        whole = served[1].completions.create(**options).choices[0].logprobs
        held = served[1].completions.create(stop=text + " five", **options).choices[0]
        cut = served[1].completions.create(stop=" three four", **options).choices[0]
        chunks = list(served[1].completions.create(stop=text + " five", stream=True, **options))
    assert "".join(whole.tokens[:-1]) == text
    assert whole.text_offset == [text.index(token) for token in whole.tokens[:-1]] + [len(text)]
    assert (held.text, held.logprobs.text_offset) == (text, whole.text_offset)
    offsets = [at for chunk in chunks for at in chunk.choices[0].logprobs.text_offset]
    assert offsets == whole.text_offset
    assert cut.text == " one two"
    assert cut.logprobs.text_offset == whole.text_offset[:-1]


def test_parts_of_a_character_are_named_by_their_bytes(served, tokenizer):
    text = "\U0001f5fa"
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert len(ids) > 1
    with scripted(tokenizer, text):
        options = {"model": "tiny", "max_tokens": 20, "temperature": 0}
        answer = served[1].completions.create(prompt="Map:", logprobs=5, **options)
        chat = served[1].chat.completions.create(
            messages=CHAT["messages"], logprobs=True, top_logprobs=20, **options
        )
    found = answer.choices[0].logprobs
    assert answer.choices[0].text == text
    named = [name.removeprefix("bytes:") for name in found.tokens[: len(ids)]]
    assert bytes.fromhex("".join(named).replace("\\x", "")).decode() == text
    for token, top in zip(found.tokens, found.top_logprobs, strict=True):
        assert len(top) == 5 + (token not in list(top)[-5:])
    content = chat.choices[0].logprobs.content[: len(ids)]
    assert bytes(b for one in content for b in one.bytes).decode() == text
    for one in content:
        assert all(other.bytes for other in one.top_logprobs)
        assert len({other.token for other in one.top_logprobs}) == 20


class Pieces:
    """A vocabulary of SentencePiece: a space is written as a letter, a rare byte by its number."""

    written = ("\u2581the", "the", "<0xE2>", "\u2581")

    def decode(self, ids):
        (token,) = ids
        return ["the", "the", "\ufffd", ""][token]

    def convert_ids_to_tokens(self, token):
        return self.written[token]


def test_names_of_tokens_of_sentencepiece():
    names = TokenNames(Pieces())
    assert [names[token] for token in range(4)] == [
        (" the", b" the"),
        ("the", b"the"),
        ("bytes:\\xe2", b"\xe2"),
        (" ", b" "),
    ]
