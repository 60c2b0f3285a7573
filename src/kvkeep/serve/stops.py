"""Stops: where a text ends, because one of some strings has come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final


@final
class Stops:
    """Lets text through up to the first stop string, however the text is cut into pieces.

    The string whose last character comes first is the one that counts. What may be the beginning of
    one is held back until it is known.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self.strings = strings
        self.found = False
        self._held = ""

    def push(self, text: str) -> str:
        """What can be given now that this came too; nothing once `found`."""
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
        """What was held back, when nothing more comes."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, string: str) -> int:
    """How many characters at the end of a text begin a string that it does not contain."""
    most = min(len(text), len(string) - 1)
    return next((n for n in range(most, 0, -1) if text.endswith(string[:n])), 0)
