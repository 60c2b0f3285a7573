"""Storage that grows geometrically: appends are O(1) amortised, and nobody names a max length."""

from __future__ import annotations

from contextlib import suppress
from typing import ClassVar, NamedTuple, final

import torch
from torch import Tensor

from kvkeep.errors import OutOfMemoryError, SpecError
from kvkeep.storage.buffer import Buffer

_FIRST_SLOTS = 16
_MOST_GROWTH = 16.0
_SMALL_GROWTH = 1.25
_MOST_SPARE = 1.5


class Growth(NamedTuple):
    """How many slots are allocated for those in use."""

    grown: float
    """As many times as many, after growing."""
    most: float
    """The most, before slots are given back."""
    left: float
    """As many times as many, after giving back."""

    @classmethod
    def on(cls, device: torch.device, factor: float | None = None) -> Growth:
        """The rule for a device; `factor` in place of its own.

        On the CPU spare slots cost address space only. On an accelerator they are memory, so that
        capacity is at most 1.5 times what is used, unless `factor` says more. There a quarter is
        spare after growing: each slot is moved four times in all, which is little beside reading
        it for each token, and a sixth of the slots in use must go before any are given back, so
        that steps which add and evict do not reallocate.
        """
        factor = factor or (2.0 if device.type == "cpu" else _SMALL_GROWTH)
        if device.type == "cpu" or factor > _MOST_SPARE:
            return cls(factor, 2 * factor, factor)
        return cls(factor, _MOST_SPARE, min(factor, _SMALL_GROWTH))

    def room(self, slots: int) -> int:
        """Slots to allocate so that `slots` fit."""
        return max(_FIRST_SLOTS, int(slots * self.grown))

    def less(self, slots: int, capacity: int) -> int | None:
        """Slots to allocate for `slots` in place of `capacity`; None: leave it."""
        if capacity <= max(_FIRST_SLOTS, int(slots * self.most)):
            return None
        return max(_FIRST_SLOTS, int(slots * self.left))


class Bounded(NamedTuple):
    """How many slots are allocated where at most `bound` stay after a step, see `Storage.bound`.

    At most an eighth is spare then, on any device: also on the CPU small buffers are memory, and so
    is what a chunk has written to before it was evicted. A sixteenth is spare after growing, so
    that each slot is moved sixteen times in all; chunks of an eighth of the bound or less are fed
    without reallocation.
    """

    bound: int
    factor: float | None = None
    """By how much it grows in place of a sixteenth, up to the bound."""

    def room(self, slots: int) -> int:
        """Slots to allocate so that `slots` fit."""
        little = slots + max(1, slots // 16)
        if slots > self.bound:
            return little
        wanted = little if self.factor is None else int(slots * self.factor)
        return min(self.bound, max(_FIRST_SLOTS, wanted))

    def less(self, slots: int, capacity: int) -> int | None:
        """Slots to allocate for `slots` in place of `capacity`; None: leave it."""
        stay = max(slots, self.bound)
        return None if capacity <= stay + max(2, stay // 8) else self.room(slots)


@final
class Growing(Buffer):
    """Written in place; multiplies its capacity when full. The default.

    Args:
        factor: by how much it grows; None: as its device or a policy's budget suggests, see
            `Growth` and `Bounded`. A factor above 1.5 is taken on an accelerator too, and costs as
            much memory as it says.

    Freed slots are given back once they outnumber those in use and their spare part, on an
    accelerator once capacity is 1.5 times what is used. Where a policy has a budget (`bound`), no
    more than an eighth beyond it stays allocated after a step.
    """

    name: ClassVar[str] = "growing"

    def __init__(self, factor: float | None = None) -> None:
        super().__init__()
        self._growth: Growth | Bounded | None = None
        if factor is not None and not 1.0 < factor <= _MOST_GROWTH:
            raise SpecError(
                f"growing storage with factor {factor}: it must be above 1 and at most "
                f"{_MOST_GROWTH}; use @growing for the device's own"
            )
        self.factor = factor

    def _alike(self) -> Growing:
        return Growing(self.factor)

    def behind(self, slots: int) -> Growing:
        """In smaller steps, for what lies behind frozen slots is often one of many forks."""
        storage = Growing(min(self.factor or _SMALL_GROWTH, _SMALL_GROWTH))
        storage.bound = None if self.bound is None else max(0, self.bound - slots)
        return storage

    def _capacity_for(self, slots: int, device: torch.device) -> int:
        if self.bound is None:
            self._growth = Growth.on(device, self.factor)
        else:
            self._growth = Bounded(self.bound, self.factor)
        return self._growth.room(slots)

    def evict(self, victims: Tensor) -> None:
        super().evict(victims)
        self._give_back()

    def truncate(self, length: int) -> None:
        super().truncate(length)
        self._give_back()

    def _give_back(self) -> None:
        if self._growth is None:
            return
        capacity = self._growth.less(self._length, self.capacity)
        if capacity is not None:
            # Where there is no memory to move to, slots are given back by a later growth.
            with suppress(OutOfMemoryError):
                self._reallocate(capacity, self._planes)
