"""Progress reports of long functions."""

from __future__ import annotations

from collections.abc import Callable

from kvkeep.host.cache import ModelCache

Progress = Callable[[str, float | None], None]
"""Called with the current activity and the completed share, 0 to 1 (None: not known)."""

OnStart = Callable[[ModelCache, int], None]
"""Called before a prompt is read, with its cache and the number of its tokens."""


def silent(doing: str, share: float | None = None) -> None:
    """Progress that is not displayed."""


class Work:
    """Consecutive stages of known costs. A stage that ends early counts as complete.

    Args:
        total: the costs of all stages, in any unit.
    """

    def __init__(self, progress: Progress, total: float) -> None:
        self._progress, self._total = progress, max(total, 1e-9)
        self._done = self._begin = self._end = 0.0
        self._doing = ""

    def stage(self, doing: str, cost: float = 1) -> None:
        """Begin the next stage."""
        self._doing = doing
        self._begin = self._done = self._end
        self._end += cost
        self.tick(0)

    def tick(self, cost: float) -> None:
        """Add a completed part of the stage's cost."""
        self._done = min(self._done + cost, self._end)
        self._progress(self._doing, min(1.0, self._done / self._total))

    def part(self, share: float) -> None:
        """Add a completed share of the stage, 0 to 1."""
        self.tick(share * (self._end - self._begin))
