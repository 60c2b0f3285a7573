"""The text of each token, whatever the tokenizer does at a text's start and within characters."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kvkeep.generate import TokenTexts

SENTENCE = "the old man's 日 😀"


def by_bytes():
    """Byte-level: one token a byte, and one with a space before it."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    vocabulary = {letter: i for i, letter in enumerate(sorted(alphabet))} | {"Ġo": 256}
    made = Tokenizer(models.BPE(vocabulary, [("Ġ", "o")]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made)


def by_sentence_piece():
    """Like Llama 2's: words begin with a mark, which is no space at a text's start; characters that
    it does not know are bytes."""
    words = ["<unk>", "▁the", "▁old", "▁man", "'s", "▁"]
    vocabulary = {word: i for i, word in enumerate([*words, *(f"<0x{i:02X}>" for i in range(256))])}
    made = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    fused = [decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), *fused])
    return PreTrainedTokenizerFast(tokenizer_object=made)


def ids_of(tokenizer, *tokens):
    """Of tokens as they are written, or of a character's bytes."""
    return [
        token
        for text in tokens
        for token in (
            [tokenizer.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in text.encode()]
            if len(text) == 1 and text != "▁"
            else [tokenizer.convert_tokens_to_ids(text)]
        )
    ]


def cases():
    tokenizer = by_bytes()
    ids = tokenizer(SENTENCE).input_ids
    expected = [*"the", " o", *"ld man's ", "", "", "日", " ", "", "", "", "😀"]
    yield pytest.param(tokenizer, ids, expected, id="bytes")
    tokenizer = by_sentence_piece()
    ids = ids_of(tokenizer, "▁the", "▁old", "▁man", "'s", "▁", "日", "▁", "😀")
    expected = ["the", " old", " man", "'s", " ", "", "", "日", " ", "", "", "", "😀"]
    yield pytest.param(tokenizer, ids, expected, id="sentence-piece")


@pytest.mark.parametrize(("tokenizer", "ids", "expected"), list(cases()))
def test_texts_join_to_the_whole_wherever_it_is_divided(tokenizer, ids, expected):
    for cut in range(len(ids)):
        texts = TokenTexts(tokenizer)
        assert texts.push(ids[:cut]) + texts.push(ids[cut:]) == expected
    assert "".join(expected) == SENTENCE == tokenizer.decode(ids)


def test_replacement_characters_do_not_make_later_tokens_dear(monkeypatch):
    tokenizer, decoded = by_bytes(), []
    text = "\ufffd" * 100 + "a"
    ids = tokenizer(text).input_ids
    whole = tokenizer.decode
    monkeypatch.setattr(
        tokenizer,
        "decode",
        lambda ids, **options: decoded.append(len(ids)) or whole(ids, **options),
    )
    assert "".join(TokenTexts(tokenizer).push(ids)) == text
    assert max(decoded) <= 40
