"""Blocks in prompts and chats: which tokens are theirs, and which blocks are refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeep.blocks import Block, Chat, Prompt, Text
from kvkeep.blocks.parts import Mark, marked
from kvkeep.errors import SpecError

STORY = (
    "The lighthouse of Aldermere was built in 1843 by Ida Brandt, who had lost a ship there. Its "
    "keeper, her grandson, painted the tower green, though the harbour office forbade it."
)
OTHER = (
    "In the storm of 1911 the lamp failed, and he rang the bell by hand for eleven hours. Nobody "
    "was lost that night, and the bell hangs in the town hall to this day."
)


class Page:
    """A component of somebody else's."""

    def __init__(self, title, *blocks):
        self.title, self.blocks = title, blocks

    def parts(self):
        return [f"# {self.title}\n\n", *self.blocks, "\n\n"]


def reasons(encoded):
    return [segment.refused for segment in encoded.blocks]


def texts_of(encoded, tokenizer):
    """What the tokens of each block say."""
    return [
        None if one.span is None else tokenizer.decode(encoded.input_ids[0, slice(*one.span)])
        for one in encoded.blocks
    ]


def chat_ids(tokenizer, messages, **options):
    options = {"add_generation_prompt": True} | options
    found = tokenizer.apply_chat_template(
        messages, return_tensors="pt", return_dict=True, **options
    )
    return found.input_ids


def test_marks_are_around_the_text_of_a_block():
    found = marked(["ab", Block(" cd\n"), Text("ef"), Block("gh", use_cache=False), Block("  ")])
    assert found.text == "ab cd\nefgh  "
    assert found.marks == [Mark(3, 5), Mark(12, 12)]
    nested = marked(Block(["  a", Block("b c"), Block([" d "])]))
    assert nested.text == "  ab c d "
    assert nested.marks == [Mark(2, 8), Mark(3, 6), Mark(7, 8)]
    page = marked([Page("One", Block("two"))])
    assert (page.text, page.marks) == ("# One\n\ntwo\n\n", [Mark(7, 10)])
    assert Prompt([Prompt(["a", Block("b")]), "c"]).text == "abc"


@pytest.mark.parametrize("bad", [3, None, object(), b"text", {"text": "a"}, Page])
def test_what_is_no_part(bad):
    with pytest.raises(SpecError, match="not a part of a prompt"):
        Prompt(["a", bad])


def test_a_prompt(tokenizer):
    encoded = Prompt(["Read this.\n\n", Block(STORY), "\n\n", Block(OTHER), "\n\nWho?"]).encode(
        tokenizer
    )
    whole = tokenizer(f"Read this.\n\n{STORY}\n\n{OTHER}\n\nWho?", return_tensors="pt").input_ids
    assert encoded.input_ids.equal(whole)
    assert reasons(encoded) == ["", ""]
    assert texts_of(encoded, tokenizer) == [STORY, OTHER]
    assert encoded.report is None


def test_the_same_block_has_the_same_tokens_wherever_it_stands(tokenizer):
    def tokens(*parts):
        encoded = Prompt(parts).encode(tokenizer)
        one = next(s for s in encoded.blocks if s.text == STORY)
        return encoded.input_ids[0, slice(*one.span)].tolist()

    alone = tokens(Block(STORY))
    assert tokens("Text:\n\n", Block(STORY), "\n\nQuestion?") == alone
    assert tokens(Block(OTHER), "\n", Block(STORY), "\n") == alone
    # " The" is one token, which is left to the text.
    assert tokens("A: ", Block(f"{STORY}\n\n"), Block(OTHER)) == alone[1:]


def test_bad_blocks_are_refused_and_the_prompt_stays_what_it_is(tokenizer):
    cases = [
        (Block("Too short a text."), "it is too short: it has 5 tokens, but needs at least 16"),
        (Block(""), "it is empty"),
        (Block(" \n\t "), "it is empty"),
        (
            " It is un",
            Block("believable as it is, " + STORY),
            "within a word of ' unbelie'",
        ),
        (Block(STORY[:-1] + " and by"), "standers", "within a word of ' bystand'"),
    ]
    for *parts, reason in cases:
        encoded = Prompt(["Look:", *parts, " Well?"]).encode(tokenizer)
        (found,) = reasons(encoded)
        assert reason in found
        text = Prompt(["Look:", *parts, " Well?"]).text
        assert encoded.input_ids[0].tolist() == tokenizer(text).input_ids
    assert reasons(Prompt([Block("Too short a text.")]).encode(tokenizer, shortest=5)) == [""]


def test_a_block_inside_another(tokenizer):
    both = Prompt(["Pages:\n", Block([STORY, "\n\n", Block(OTHER)]), "\n"]).encode(tokenizer)
    assert reasons(both) == ["", "it is inside a block that is reused"]
    assert texts_of(both, tokenizer)[0] == f"{STORY}\n\n{OTHER}"
    inner = Prompt(["It is un", Block(["believable. ", STORY, "\n\n", Block(OTHER)]), "\n"]).encode(
        tokenizer
    )
    assert "falls within a word" in reasons(inner)[0]
    assert reasons(inner)[1] == ""
    assert texts_of(inner, tokenizer)[1] == OTHER


def test_a_tokenizer_that_does_not_say_where_its_tokens_are(tokenizer):
    class Slow:
        is_fast = False

        def __call__(self, text, **options):
            assert not options.pop("return_offsets_mapping")
            return tokenizer(text, **options)

    encoded = Prompt([Block(STORY), "?"]).encode(Slow())
    assert encoded.input_ids[0].tolist() == tokenizer(f"{STORY}?").input_ids
    assert "no character offsets" in reasons(encoded)[0]


# -- chats ----------------------------------------------------------------------------------


def test_a_chat(tokenizer):
    messages = [
        {"role": "system", "content": Block(STORY)},
        {"role": "user", "content": ["Compare:\n", Block(OTHER), "\nwith it."]},
        {"role": "assistant", "content": "I will."},
        {"role": "tool", "content": Page("Found", Block(STORY))},
        {"role": "user", "content": "Go on."},
    ]
    plain = [
        {"role": "system", "content": STORY},
        {"role": "user", "content": f"Compare:\n{OTHER}\nwith it."},
        {"role": "assistant", "content": "I will."},
        {"role": "tool", "content": f"# Found\n\n{STORY}\n\n"},
        {"role": "user", "content": "Go on."},
    ]
    encoded = Chat(messages).encode(tokenizer)
    assert encoded.input_ids.equal(chat_ids(tokenizer, plain))
    assert reasons(encoded) == ["", "", ""]
    assert texts_of(encoded, tokenizer) == [STORY, OTHER, STORY]
    unasked = Chat(messages, add_generation_prompt=False).encode(tokenizer)
    assert unasked.input_ids.equal(chat_ids(tokenizer, plain, add_generation_prompt=False))


def test_the_same_text_twice_and_once_unmarked(tokenizer):
    messages = [{"role": "user", "content": [STORY, "\n", Block(STORY), "\n", Block(STORY), "\n?"]}]
    encoded = Chat(messages).encode(tokenizer)
    one, two = (segment.span for segment in encoded.blocks)
    assert texts_of(encoded, tokenizer) == [STORY, STORY]
    before = tokenizer.decode(encoded.input_ids[0, : one.start])
    assert before.endswith(f"{STORY}\n")
    assert two.start > one.stop


def test_a_block_with_template_text(tokenizer):
    odd = f"<|im_end|>\n<|im_start|>assistant\n{STORY}<|im_end|>"
    encoded = Chat([{"role": "user", "content": [Block(odd), "?"]}]).encode(tokenizer)
    assert encoded.input_ids.equal(chat_ids(tokenizer, [{"role": "user", "content": f"{odd}?"}]))
    assert texts_of(encoded, tokenizer) == [odd]


def test_text_that_looks_like_a_mark_is_text(tokenizer):
    odd = f"{'0' * 32}a0q {STORY} {'0' * 32}z0q \ue000\u2063\ufeff 🗼"
    messages = [{"role": "user", "content": [odd, Block(f"{odd}\n"), odd]}]
    encoded = Chat(messages).encode(tokenizer)
    plain = [{"role": "user", "content": f"{odd}{odd}\n{odd}"}]
    assert encoded.input_ids.equal(chat_ids(tokenizer, plain))
    assert len(encoded.blocks) == 1


TEMPLATES = {
    "strips": ("{% for m in messages %}[{{ m['content'] | trim }}]{% endfor %}", [""]),
    "as json": ("{% for m in messages %}{{ m | tojson }}{% endfor %}", [""]),
    "twice": (
        "{% for m in messages %}{{ m['content'] }} / {{ m['content'] }}{% endfor %}",
        ["the template has it 2 times"],
    ),
    "not at all": ("{% for m in messages %}{{ m['role'] }}{% endfor %}", ["has it 0 times"]),
    "upper case": (
        "{% for m in messages %}{{ m['content'] | upper }}{% endfor %}",
        ["changes its text"],
    ),
    "cuts": (
        "{% for m in messages %}{{ m['content'][:150] }}{% endfor %}",
        ["changes its text"],
    ),
    "counts": (
        "{% for m in messages %}{{ m['content'] | length }} {{ m['content'] }}{% endfor %}",
        ["changes its text"],
    ),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates(tokenizer, name):
    template, wanted = TEMPLATES[name]
    messages = [{"role": "user", "content": ["  ", Block(f"\n{STORY}\n\n"), " "]}]
    encoded = Chat(messages, chat_template=template).encode(tokenizer)
    plain = [{"role": "user", "content": f"  \n{STORY}\n\n "}]
    assert encoded.input_ids.equal(chat_ids(tokenizer, plain, chat_template=template))
    for found, reason in zip(reasons(encoded), wanted, strict=True):
        assert found == reason or (reason and reason in found)


def test_one_bad_block_leaves_the_others(tokenizer):
    template = (
        "{% for m in messages %}{{ m['content'] | upper if loop.first else m['content'] }}\n"
        "{% endfor %}"
    )
    messages = [{"role": "user", "content": Block(text)} for text in (STORY, OTHER)]
    encoded = Chat(messages, chat_template=template).encode(tokenizer)
    assert reasons(encoded) == ["the template changes its text", ""]
    assert texts_of(encoded, tokenizer) == [None, OTHER]


def test_blocks_in_tools_and_content_lists(tokenizer):
    template = (
        "{{ tools[0]['description'] }}\n{% for m in messages %}{% for c in m['content'] %}"
        "{{ c['text'] }}\n{% endfor %}{% endfor %}"
    )
    tools = [{"type": "function", "description": Block(STORY)}]
    messages = [{"role": "user", "content": [{"type": "text", "text": Block(OTHER)}]}]
    encoded = Chat(messages, tools=tools, chat_template=template).encode(tokenizer)
    assert texts_of(encoded, tokenizer) == [OTHER, STORY]


def test_a_tokenizer_without_a_template(tokenizer):
    class Bare:
        chat_template = None

    with pytest.raises(SpecError, match="no chat template"):
        Chat([{"role": "user", "content": "a"}]).encode(Bare())


PARTS = st.recursive(
    st.one_of(
        st.text(alphabet="ab \n.é🗼<|im_end|>", max_size=12),
        st.sampled_from([STORY, OTHER, "un", "believable", " ", "\n\n", "..."]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(Block),
        inner.map(lambda part: Block(part, use_cache=False)),
        st.lists(inner, max_size=2).map(lambda parts: Page("T", *parts)),
    ),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None)
@given(parts=st.lists(PARTS, max_size=5), shortest=st.integers(1, 8))
def test_any_parts(tokenizer, parts, shortest):
    """Tokens are always those of the plain text, and blocks' tokens are theirs alone."""
    prompt = Prompt(parts)
    text = marked([Page("T", Block(parts)), "x"]).text
    assert text == f"# T\n\n{prompt.text}\n\nx"
    chat = Chat([{"role": "user", "content": [*parts, Block("")]}])
    plain = [{"role": "user", "content": prompt.text}]
    for encoded, ids in (
        (prompt.encode(tokenizer, shortest=shortest), tokenizer(prompt.text).input_ids),
        (chat.encode(tokenizer, shortest=shortest), chat_ids(tokenizer, plain)[0].tolist()),
    ):
        assert encoded.input_ids[0].tolist() == ids
        used = torch.zeros(len(ids), dtype=torch.int)
        for segment in encoded.blocks:
            if not segment.refused:
                used[slice(*segment.span)] += 1
                assert segment.span.stop - segment.span.start >= shortest
                said = tokenizer.decode(ids[slice(*segment.span)])
                assert said.strip("\ufffd") in segment.text  # its ends may be parts of characters
        assert not len(ids) or int(used.max()) <= 1
