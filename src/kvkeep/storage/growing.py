"""Storage that grows geometrically: appends are O(1) amortised, and nobody names a max length."""

from __future__ import annotations

from typing import ClassVar, final

from torch import Tensor

from kvkeep.errors import SpecError
from kvkeep.storage.buffer import Buffer

_FIRST_SLOTS = 16
_MOST_GROWTH = 16.0
_FACTOR_OF_FORKS = 1.25


@final
class Growing(Buffer):
    """Written in place; multiplies its capacity by `factor` when full. The default.

    On the CPU spare capacity costs address space only (see `storage.memory`). Freed slots are
    given back once they outnumber those in use and their spare part.
    """

    name: ClassVar[str] = "growing"

    def __init__(self, factor: float = 2.0) -> None:
        super().__init__()
        if not 1.0 < factor <= _MOST_GROWTH:
            raise SpecError(
                f"growing storage with factor {factor}: it must be above 1 and at most "
                f"{_MOST_GROWTH}; use @growing for 2"
            )
        self.factor = factor

    def another(self) -> Growing:
        return Growing(self.factor)

    def behind(self, slots: int) -> Growing:
        """In smaller steps, for what lies behind frozen slots is often one of many forks."""
        return Growing(min(self.factor, _FACTOR_OF_FORKS))

    def _capacity_for(self, slots: int) -> int:
        return max(_FIRST_SLOTS, int(slots * self.factor))

    def evict(self, victims: Tensor) -> None:
        super().evict(victims)
        self._give_back()

    def truncate(self, length: int) -> None:
        super().truncate(length)
        self._give_back()

    def _give_back(self) -> None:
        capacity = self._capacity_for(self._length)
        if self.capacity > 2 * capacity:
            self._reallocate(capacity, self._planes)
