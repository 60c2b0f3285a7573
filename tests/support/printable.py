"""A tokenizer whose tokens are printable characters, for tiny models of 60 tokens and more."""

from __future__ import annotations


class Printable:
    """A tokenizer of one character a token."""

    def __call__(self, text):
        return {"input_ids": [ord(c) - 30 for c in text]}

    def decode(self, ids, skip_special_tokens=True):
        return "".join(chr(token + 30) for token in ids)
