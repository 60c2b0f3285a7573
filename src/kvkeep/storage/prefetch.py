"""Device copies of slots that lie on the host: those of the storage in use, and of the next one."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any, NamedTuple, Protocol, final
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor

from kvkeep.errors import OutOfMemoryError
from kvkeep.storage.allocate import SHORTAGE, out_of_memory, reserve
from kvkeep.storage.copy_stream import Side
from kvkeep.storage.growing import Growth

_ALIGNED = 256  # bytes, where a plane begins


class Layout(NamedTuple):
    """One plane: its name, the shape of one slot in all rows and heads, (B, H, ...), its dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot."""
        return math.prod(self.shape) * self.dtype.itemsize


class Carried(Protocol):
    """A storage whose planes lie on the host, slots first: (capacity, B, H, ...)."""

    layout: tuple[Layout, ...]
    host: dict[str, Tensor]

    @property
    def length(self) -> int:
        """Slots in use."""

    def land(self) -> None:
        """Put what is on its way to single slots of `host` in its place."""


class _Stage:
    """Device memory for the planes of one storage at a time."""

    def __init__(self) -> None:
        self.owner: ref[Carried] | None = None
        self.arena: Tensor | None = None
        self.layout: tuple[Layout, ...] = ()
        self.room = 0  # slots that fit
        self.slots: dict[str, Tensor] = {}  # (room, B, H, ...): the slots in use are one run
        self.planes: dict[str, Tensor] = {}  # (B, H, room, ...): views of the same
        self.copied: Any = None  # the mark behind the copy of its owner

    def holds(self, storage: Carried) -> bool:
        return self.owner is not None and self.owner() is storage

    @property
    def nbytes(self) -> int:
        return 0 if self.arena is None else self.arena.numel()

    def take(self, arena: Tensor | None, layout: tuple[Layout, ...] = ()) -> None:
        """Divide an arena among planes of some layout."""
        if arena is self.arena and layout == self.layout:
            return
        self.arena, self.layout, self.room, self.slots, self.planes = None, (), 0, {}, {}
        if arena is None:
            return
        spare = arena.numel() - _ALIGNED * len(layout)
        room = spare // sum(plane.slot_bytes for plane in layout)
        found: dict[str, Tensor] = {}
        start = 0
        with torch.inference_mode(False), torch.no_grad():
            for plane in layout:
                stop = start + room * plane.slot_bytes
                found[plane.name] = arena[start:stop].view(plane.dtype).view(room, *plane.shape)
                start = -(-stop // _ALIGNED) * _ALIGNED
            planes = {name: slots.movedim(0, 2) for name, slots in found.items()}
        # All at once: an interrupt leaves a stage divided, or empty.
        self.arena, self.layout, self.room, self.slots, self.planes = (
            arena,
            layout,
            room,
            found,
            planes,
        )


class Lane:
    """Two stages on one device: for the storage in use, and for the one that follows.

    Which one follows is what followed the last time. What is asked of one storage's copy is asked
    before another storage is: from then on the copy may be overwritten, by copies that wait for all
    that was asked of the device until then.
    """

    def __init__(self, device: torch.device) -> None:
        self.side = Side(device)
        self._device = device
        self._current, self._other = _Stage(), _Stage()
        self._after: WeakKeyDictionary[Carried, ref[Carried]] = WeakKeyDictionary()
        self._needs: WeakKeyDictionary[Carried, int] = WeakKeyDictionary()  # bytes

    def planes(self, storage: Carried) -> dict[str, Tensor]:
        """A storage's planes (B, H, room, ...), with its slots in use as they are on the host.
        Valid until another storage is asked for.

        Raises:
            OutOfMemoryError: the device has no room for them.
        """
        if not self._current.holds(storage):
            self._enter(storage)
        return self._current.planes

    def slots(self, storage: Carried) -> dict[str, Tensor]:
        """The same, slots first: (room, B, H, ...)."""
        self.planes(storage)
        return self._current.slots

    def widened(self, storage: Carried, slots: int) -> dict[str, Tensor]:
        """`planes`, with room for so many slots.

        Raises:
            OutOfMemoryError: the device has no room for them; nothing was changed.
        """
        self.planes(storage)
        if slots > self._current.room:
            wider, former = _Stage(), self._current
            self._fit(wider, storage, slots)
            for name, plane in former.slots.items():
                wider.slots[name][: storage.length].copy_(plane[: storage.length])
            wider.owner, self._current = former.owner, wider
        return self._current.planes

    def forget(self, storage: Carried) -> None:
        """The copies of a storage are out of date."""
        for stage in (self._current, self._other):
            if stage.holds(storage):
                stage.owner = None

    def nbytes(self, storage: Carried) -> int:
        """Bytes of the stage that a storage has now."""
        return sum(s.nbytes for s in (self._current, self._other) if s.holds(storage))

    def _enter(self, storage: Carried) -> None:
        if not self._other.holds(storage):
            self._fetch(storage, self._other)
        last = _alive(self._current.owner)
        self._current, self._other = self._other, self._current
        self.side.before_compute(self._current.copied)
        if last is not None:
            self._after[last] = ref(storage)
        following = _alive(self._after.get(storage))
        if following is not None and following.length and not self._other.holds(following):
            with suppress(OutOfMemoryError):  # then it is fetched when it is needed
                self._fetch(following, self._other)

    def _fetch(self, storage: Carried, stage: _Stage) -> None:
        stage.owner = None
        storage.land()
        self._fit(stage, storage, storage.length + 1)
        self.side.after_compute()  # which may still read what lay there before
        for name, plane in storage.host.items():
            self.side.copy(stage.slots[name][: storage.length], plane[: storage.length])
        stage.copied, stage.owner = self.side.mark(), ref(storage)

    def _fit(self, stage: _Stage, storage: Carried, slots: int) -> None:
        """Have room in a stage for so many slots of a storage; it is as large as the largest
        storage needs."""
        least = slots * sum(p.slot_bytes for p in storage.layout) + _ALIGNED * len(storage.layout)
        largest = max([least, *(n for s, n in self._needs.items() if s is not storage)])
        growth, arena = Growth.on(self._device), stage.arena
        if stage.nbytes < least or stage.nbytes > growth.most * largest:
            arena = None
            stage.take(None)  # before more is allocated
            try:
                arena = reserve((int(growth.grown * largest),), torch.uint8, self._device)
            except SHORTAGE as error:
                held = sum(plane.slot_bytes for plane in storage.layout) * storage.length
                raise out_of_memory(slots, largest, held, self._device) from error
        stage.take(arena, storage.layout)
        self._needs[storage] = least


@final
class Courier:
    """What the storages of one cache share: a lane for each device. Copies of a cache have their
    own."""

    def __init__(self) -> None:
        self._lanes: dict[torch.device, Lane] = {}
        self._lead: Courier | None = None

    @property
    def lead(self) -> Courier:
        """The courier whose lanes are used: this one, or that of the cache it has joined."""
        return self if self._lead is None else self._lead.lead

    def lane(self, device: torch.device) -> Lane:
        """The lane of a device."""
        lanes = self.lead._lanes
        if device not in lanes:
            lanes[device] = Lane(device)
        return lanes[device]

    def join(self, other: Courier) -> None:
        """Use another one's lanes."""
        mine, lead = self.lead, other.lead
        if mine is not lead:
            for lane in mine._lanes.values():
                lane.side.finish()  # another lane's copies do not wait for these
            mine._lanes.clear()
            mine._lead = lead

    def __reduce__(self) -> tuple[type[Courier], tuple[()]]:
        return Courier, ()


def _alive(storage: ref[Carried] | None) -> Carried | None:
    return None if storage is None else storage()
