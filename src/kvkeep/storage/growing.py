"""Storage that grows geometrically: an append is amortised O(1), and there is no maximum length."""

from __future__ import annotations

from contextlib import suppress
from typing import ClassVar, NamedTuple, Self, final

import torch
from torch import Tensor

from kvkeep.errors import OutOfMemoryError, SpecError
from kvkeep.storage.buffer import Buffer

_FIRST_SLOTS = 16
_MOST_GROWTH = 16.0
_SMALL_GROWTH = 1.25
_MOST_SPARE = 1.5


class Growth(NamedTuple):
    """How many slots to allocate, as multiples of the slots in use."""

    grown: float
    """The capacity after growing."""
    most: float
    """The largest capacity that is kept; above it, spare slots are freed."""
    left: float
    """The capacity after freeing spare slots."""

    @classmethod
    def on(cls, device: torch.device, factor: float | None = None) -> Growth:
        """The rule for a device; `factor` replaces the device's default growth factor.

        On the CPU, spare slots take only address space. On an accelerator they occupy memory, so
        capacity is at most 1.5 times the slots in use, unless `factor` is larger. Growing by a
        quarter copies each slot about four times in all, which costs little compared with reading
        it for each token. Spare slots are freed only after a sixth of the slots was evicted, so
        that steps which append and evict do not reallocate.
        """
        factor = factor or (2.0 if device.type == "cpu" else _SMALL_GROWTH)
        if device.type == "cpu" or factor > _MOST_SPARE:
            return cls(factor, 2 * factor, factor)
        return cls(factor, _MOST_SPARE, min(factor, _SMALL_GROWTH))

    def room(self, slots: int) -> int:
        """Slots to allocate so that `slots` fit."""
        return max(_FIRST_SLOTS, int(slots * self.grown))

    def less(self, slots: int, capacity: int) -> int | None:
        """The smaller capacity to allocate for `slots` slots; None: keep `capacity`."""
        if capacity <= max(_FIRST_SLOTS, int(slots * self.most)):
            return None
        return max(_FIRST_SLOTS, int(slots * self.left))


class Bounded(NamedTuple):
    """How many slots to allocate if at most `bound` stay after a step; see `Storage.bound`.

    At most an eighth is spare, on any device: on the CPU too, small buffers are memory, and so are
    slots that a chunk was written to before it was evicted. A sixteenth is spare after growing, so
    each slot is copied sixteen times in all. Chunks of at most an eighth of the bound are fed
    without reallocation; for larger ones see `Growing.make_room`. If the bound is 0, twice as much
    is spare: the number of slots of a competing head goes up and down, and a reallocation takes
    as long as several steps.
    """

    bound: int
    factor: float | None = None
    """The growth factor up to the bound; None: 17/16."""

    @property
    def _share(self) -> int:
        """The slots of which one may be spare."""
        return 8 if self.bound else 4

    def room(self, slots: int) -> int:
        """Slots to allocate so that `slots` fit."""
        little = slots + max(1, slots // (2 * self._share))
        if slots > self.bound:
            return little
        wanted = little if self.factor is None else int(slots * self.factor)
        return min(self.bound, max(_FIRST_SLOTS, wanted))

    def most(self, slots: int) -> int:
        """The most capacity that is kept for `slots` slots."""
        stay = max(slots, self.bound)
        return stay + max(2, stay // self._share)

    def less(self, slots: int, capacity: int) -> int | None:
        """The smaller capacity to allocate for `slots` slots; None: keep `capacity`."""
        return None if capacity <= self.most(slots) else self.room(slots)


@final
class Growing(Buffer):
    """Slots are written in place; the capacity is multiplied when it is full. The default storage.

    Args:
        factor: the growth factor; None: chosen for the device or for a policy's budget, see
            `Growth` and `Bounded`. On an accelerator, spare slots from a factor above 1.5 occupy
            memory.

    After an eviction, spare slots are freed if the capacity is more than twice what growing would
    allocate; on an accelerator, if it is more than 1.5 times the slots in use. If a policy has a
    budget (`bound`), at most an eighth more than the slots kept stays allocated after a step, or a
    quarter if their number changes.
    """

    name: ClassVar[str] = "growing"

    def __init__(self, factor: float | None = None) -> None:
        super().__init__()
        self._growth: Growth | Bounded | None = None
        if factor is not None and not 1.0 < factor <= _MOST_GROWTH:
            raise SpecError(
                f"growing storage with factor {factor}: it must be above 1 and at most "
                f"{_MOST_GROWTH}; use @growing for the device's default"
            )
        self.factor = factor

    def _alike(self) -> Growing:
        return Growing(self.factor)

    def empty_copy(self, behind: int = 0) -> Self:
        """See `Storage.empty_copy`. Behind frozen slots it grows in small steps, because there may
        be many forks."""
        fresh = super().empty_copy(behind)
        if behind:
            fresh.factor = min(self.factor or _SMALL_GROWTH, _SMALL_GROWTH)
        return fresh

    def _capacity_for(self, slots: int, device: torch.device) -> int:
        if self.bound is None:
            self._growth = Growth.on(device, self.factor)
        else:
            self._growth = Bounded(self.bound, self.factor)
        return self._growth.room(slots)

    def make_room(self, slots: int) -> bool:
        # Allocating room for a chunk, and freeing it, takes longer than reading the chunk as a
        # second segment. Only the native library does the latter with the same result.
        if not self.bound or self.described() is None:
            return True
        if slots <= max(self.capacity, Bounded(self.bound).most(self.bound)):
            return True
        if self.capacity < self.bound:
            self._reallocate(self.bound, self._planes)
        return False

    def evict(self, victims: Tensor) -> None:
        super().evict(victims)
        _give_back(self)

    def truncate(self, length: int) -> None:
        super().truncate(length)
        _give_back(self)


def _give_back(storage: Growing) -> None:
    """Free spare slots, if there are too many."""
    if storage._growth is None:
        return
    capacity = storage._growth.less(storage.length, storage.capacity)
    if capacity is not None:
        # If memory for the copy is short, spare slots stay until a later reallocation.
        with suppress(OutOfMemoryError):
            storage._reallocate(capacity, storage._planes)
