"""Stop strings and whole characters, in whatever pieces text comes."""

from __future__ import annotations

import pytest

from kvkeep.generate import TextStream
from kvkeep.generate.text import Stops


@pytest.mark.parametrize(
    ("stops", "text", "expected"),
    [
        (["b"], "abc", "a"),
        (["bc", "c"], "abcd", "a"),
        (["abc", "b"], "abc", "a"),  # "b" is whole before "abc" is
        (["aab"], "aaab!", "a"),
        (["\n\n"], "one\ntwo\n\nthree", "one\ntwo"),
        (["é", "😀"], "caf😀é", "caf"),
        (["never"], "nev", "nev"),
        (["x"], "", ""),
        ([], "all", "all"),
    ],
)
def test_stop_strings_do_not_depend_on_the_pieces(stops, text, expected):
    for size in (1, 2, 3, 100):
        cut = Stops(stops)
        given = []
        for start in range(0, len(text), size):
            given.append(cut.push(text[start : start + size]))
            assert expected.startswith("".join(given))
        assert "".join(given) + cut.rest() == expected
        assert cut.found == (expected != text)


@pytest.mark.parametrize("text", ["I say 👩‍👩‍👧 naïve 日本語!\n  x = 1", "😀🎉", " a"])
def test_streamed_characters_are_whole(tokenizer, text):
    ids = tokenizer(text, return_tensors="pt").input_ids
    for cut in range(1, ids.shape[1] + 1):
        stream, tokens = TextStream(tokenizer), ids[0, :cut].tolist()
        given = [stream.take(tokens[:n], last=n == cut) for n in range(1, cut + 1)]
        whole = tokenizer.decode(ids[0, :cut])
        assert "".join(given) == whole.rstrip("\ufffd")
        assert not any("\ufffd" in piece for piece in given)
    assert "".join(given) == text
