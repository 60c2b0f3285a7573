"""Turns: serve queues in turn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import count
from typing import final

from kvkeep.generate.answer import Answer


@final
class Turns:
    """Remembers when each queue was last served."""

    def __init__(self) -> None:
        self._numbers = count(1)
        self._last: dict[str, int] = {}

    def took(self, answer: Answer) -> None:
        """Record that an answer's queue was served."""
        self._last[answer.origin.queue] = next(self._numbers)

    def next(self, answers: Sequence[Answer]) -> Answer:
        """The next answer: highest priority, then least recently served queue, then age."""
        return min(answers, key=lambda x: (-x.params.priority, self._of(x), x.order))

    def in_order(self, answers: Sequence[Answer]) -> list[Answer]:
        """Answers sorted by priority; within one priority, the first of each queue, the second of
        each, and so on, starting with the least recently served queue."""
        of_queue, keys = Counter[str](), dict[Answer, tuple[int, int, int]]()
        for answer in answers:
            queue = answer.origin.queue
            keys[answer] = -answer.params.priority, of_queue[queue], self._of(answer)
            of_queue[queue] += 1
        return sorted(keys, key=keys.__getitem__)

    def _of(self, answer: Answer) -> int:
        return self._last.get(answer.origin.queue, 0)
