"""Token names: tokens as text, including tokens that are parts of a character."""

from __future__ import annotations

import re
from typing import Any, NamedTuple, final

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_UNKNOWN = "\ufffd"


def _byte_letters() -> dict[str, int]:
    """The letters for bytes in byte-level vocabularies, as GPT-2 defines them: printable Latin-1
    characters represent themselves, all other bytes follow from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    return letters | {chr(0x100 + at): byte for at, byte in enumerate(others)}


_LETTERS = _byte_letters()


class TokenName(NamedTuple):
    """A token as text, and its bytes if known. Tokens of different bytes have different texts; part
    of a character is named by its bytes, such as `bytes:\\xe2\\x82`."""

    text: str
    bytes: bytes | None


@final
class TokenNames:
    """Names the tokens of a tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, TokenName] = {}

    def __getitem__(self, token: int) -> TokenName:
        name = self._known.get(token)
        if name is None:
            name = self._known[token] = self._named(token)
        return name

    def _named(self, token: int) -> TokenName:
        text = self._tokenizer.decode([token])
        written = self._tokenizer.convert_ids_to_tokens(token) or ""
        if written.startswith("\u2581") and not text.startswith(" "):
            text = f" {text}"  # SentencePiece omits a space at the start of a text
        if _UNKNOWN not in text:
            return TokenName(text, text.encode())
        byte = _BYTE.fullmatch(written)
        if byte:
            found = bytes([int(byte[1], 16)])
        else:
            found = bytes(_LETTERS.get(letter, 0) for letter in written)
            if found.decode(errors="replace") != text:
                return TokenName(f"token_id:{token}", None)
        return TokenName("bytes:" + "".join(f"\\x{one:02x}" for one in found), found)
