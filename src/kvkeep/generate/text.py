"""Incremental decoding: the text of a growing list of tokens."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, final

_INCOMPLETE = "\ufffd"
"""The replacement character, which a tokenizer returns for an incomplete character."""

_LONGEST_PIECE = 16
"""Most tokens in a piece. No character has more tokens, so a replacement character in a longer
piece belongs to the text."""


class _Pieces:
    """A growing text, in pieces that end with complete characters.

    A tokenizer may decode a token differently at the start of a text. So new tokens are decoded
    together with the previous piece, whose text is then removed. The cost of a token does not
    depend on the text's length.

    Args:
        shown: special tokens to show; each is a piece.
        options: options of the tokenizer's `decode`.
    """

    def __init__(self, tokenizer: Any, shown: Collection[int] = (), **options: bool) -> None:
        self._decode, self._shown, self._options = tokenizer.decode, shown, options
        self._last: list[int] = []  # the ids of the previous piece
        self._new: list[int] = []  # the ids after it

    def push(self, token: int) -> str:
        """Add the next token id. Return the next piece, or "" while it is incomplete."""
        if token in self._shown:
            before, shown = self.rest(), str(self._decode([token]))
            self._last, self._new = [], []
            return before + shown
        self._new.append(token)
        text = self.rest()
        if not text or (text.endswith(_INCOMPLETE) and len(self._new) < _LONGEST_PIECE):
            return ""
        self._last, self._new = self._new, []
        return text

    def rest(self) -> str:
        """The text of the tokens after the last piece."""
        before: str = self._decode(self._last, **self._options)
        text: str = self._decode(self._last + self._new, **self._options)
        return text[len(before) :]


class TokenTexts:
    """The text of each token of a growing text, special tokens included. A character of several
    tokens belongs to its last token; the other tokens have "". Joined, they are the text."""

    def __init__(self, tokenizer: Any) -> None:
        self._pieces = _Pieces(tokenizer, clean_up_tokenization_spaces=False)

    def push(self, ids: Sequence[int]) -> list[str]:
        """The texts of the next token ids."""
        return [self._pieces.push(token) for token in ids]


@final
class Stops:
    """Returns text that arrives in pieces, up to the first complete stop string.

    Characters that may start a stop string are held back until later pieces decide.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self.strings = strings
        self.found = False
        self._held = ""

    def push(self, text: str) -> str:
        """Add a piece of text; return the text that is now certain, "" once `found`."""
        if self.found:
            return ""
        text = self._held + text
        ends = [(at + len(s), at) for s in self.strings if (at := text.find(s)) >= 0]
        if ends:
            self.found, self._held = True, ""
            return text[: min(ends)[1]]
        held = max((_overlap(text, s) for s in self.strings), default=0)
        given = len(text) - held
        self._held = text[given:]
        return text[:given]

    def rest(self) -> str:
        """The held-back characters; call at the end of the text."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, string: str) -> int:
    """The length of the longest proper prefix of `string` at the end of `text`."""
    most = min(len(text), len(string) - 1)
    return next((n for n in range(most, 0, -1) if text.endswith(string[:n])), 0)


@final
class TextStream:
    """The text of a growing answer without special tokens, in complete characters, up to a stop
    string.

    Args:
        tokenizer: the model's tokenizer.
        stop: strings that end the text.
        shown: special tokens to show in the text.
    """

    def __init__(
        self, tokenizer: Any, stop: Sequence[str] = (), shown: Collection[int] = ()
    ) -> None:
        self._tokenizer, self._stop, self._shown = tokenizer, stop, shown
        self._begin()

    def _begin(self) -> None:
        self._pieces = _Pieces(self._tokenizer, self._shown, skip_special_tokens=True)
        self._stops = Stops(self._stop)
        self._taken = 0  # number of tokens; -1 while a token is being taken
        self._offset = self._length = 0

    @property
    def stopped(self) -> bool:
        """Whether a stop string has ended the text."""
        return self._stops.found

    @property
    def offset(self) -> int:
        """Characters of the text before the newest token, including held-back characters."""
        return self._offset

    def take(self, tokens: Sequence[int], *, last: bool, ends: bool = False) -> str:
        """Add the newest token. After an interrupt it may be called again with the same tokens.

        Args:
            tokens: all tokens of the answer; all but the newest have been added.
            last: whether the answer is complete; an incomplete character is then dropped.
            ends: whether the newest token is an end token, which is not part of the text.

        Returns:
            The text that the token completes.
        """
        if self._taken != len(tokens) - 1:  # after an interrupt
            self._begin()
            for token in tokens[:-1]:
                self._push(token)
        self._taken = -1
        text = "" if ends else self._push(tokens[-1])
        if ends:
            self._offset = self._length
        if last or self._stops.found:
            text += self._stops.push(self._pieces.rest().rstrip(_INCOMPLETE)) + self._stops.rest()
        self._taken = len(tokens)
        return text

    def _push(self, token: int) -> str:
        piece = self._pieces.push(token)
        self._offset, self._length = self._length, self._length + len(piece)
        return self._stops.push(piece)
