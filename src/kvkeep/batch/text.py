"""Text: the text of an answer, token by token, up to a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

from kvkeep.batch.stops import Stops
from kvkeep.host import TextStream


@final
class Text:
    """The text of a growing answer, in complete characters, up to a stop string.

    Args:
        tokenizer: of the model.
        stop: strings that end the text.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str]) -> None:
        self._tokenizer, self._stop = tokenizer, stop
        self._begin()

    def _begin(self) -> None:
        self._new, self._stops = "", Stops(self._stop)
        self._stream = TextStream(self._tokenizer, self._add)
        self._taken = 0  # tokens; -1 while one is being taken

    def _add(self, text: str) -> None:
        self._new += self._stops.push(text)

    def take(self, tokens: Sequence[int], *, last: bool) -> tuple[str, bool]:
        """Take the newest of the tokens; those before it have been taken. It may be called again
        with the same tokens after an interrupt.

        Args:
            tokens: all of the answer.
            last: whether no other follows.

        Returns:
            The text that the token completes, and whether a stop string ends the text.
        """
        if self._taken != len(tokens) - 1:  # it was interrupted
            self._begin()
            for token in tokens[:-1]:
                self._stream.push([token])
        self._taken, self._new = -1, ""
        self._stream.push([tokens[-1]])
        if last or self._stops.found:
            self._stream.close()
            self._new += self._stops.rest()
        self._taken = len(tokens)
        return self._new, self._stops.found
