"""Protection: the positions that a policy never evicts."""

from __future__ import annotations

from typing import NamedTuple

from kvkeep.errors import SpecError
from kvkeep.planes import Reach


class Protection(NamedTuple):
    """Positions that are never evicted: the newest `recent` of a row, its first `sinks`, and
    `keep_from` to `keep_to` (exclusive)."""

    recent: int = 0
    sinks: int = 0
    keep_from: int = 0
    keep_to: int = 0

    @property
    def fixed(self) -> int:
        """The number of protected positions other than the newest: sinks and kept positions."""
        return Reach(0, *self[1:]).fixed

    @property
    def slots(self) -> int:
        """The number of protected positions: the most slots that are kept regardless of their
        score."""
        return self.recent + self.fixed

    def until(self, stop: int) -> int:
        """The value of `keep_to` that also protects the first `stop` positions.

        Raises:
            SpecError: a range that does not begin at 0 is already kept.
        """
        if self.keep_from and self.keep_to > self.keep_from:
            raise SpecError(
                f"positions {self.keep_from} to {self.keep_to} are already kept, and a policy "
                f"keeps one range; leave out keep_from={self.keep_from} or the range"
            )
        return max(stop, self.keep_to)
