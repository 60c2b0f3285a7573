"""Stops: cut a streamed text at the first stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final


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
