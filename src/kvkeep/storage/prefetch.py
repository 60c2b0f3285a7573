"""Prefetches slots from the host: device copies of the storage in use and of the next storage."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any, NamedTuple, Protocol, final
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor

from kvkeep.errors import OutOfMemoryError
from kvkeep.storage.allocate import SHORTAGE, out_of_memory, reserve
from kvkeep.storage.copy_stream import CopyStream
from kvkeep.storage.growing import Growth

_ALIGNED = 256  # a plane begins at a multiple of this many bytes


class HostPlane(NamedTuple):
    """A plane on the host: its name, the shape (B, H, ...) of one of its slots, and its dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot."""
        return math.prod(self.shape) * self.dtype.itemsize


class OnHost(Protocol):
    """Slots in host memory, of which a device may have a copy. See `HostPlanes`."""

    layout: tuple[HostPlane, ...]
    host: dict[str, Tensor]
    length: int

    def write_pending(self) -> None:
        """Write single slots that are still being copied from the device to host memory."""


class _StagingBuffer:
    """Device memory for the planes of one storage at a time."""

    def __init__(self) -> None:
        self.owner: ref[OnHost] | None = None
        self.arena: Tensor | None = None
        self.layout: tuple[HostPlane, ...] = ()
        self.room = 0  # slots that fit
        self.slots: dict[str, Tensor] = {}  # (room, B, H, ...): slots in use are contiguous
        self.planes: dict[str, Tensor] = {}  # (B, H, room, ...): views of `slots`
        self.copied: Any = None  # the event after the copy of the owner's planes

    def holds(self, storage: OnHost) -> bool:
        return self.owner is not None and self.owner() is storage

    @property
    def nbytes(self) -> int:
        return 0 if self.arena is None else self.arena.numel()

    def take(self, arena: Tensor | None, layout: tuple[HostPlane, ...] = ()) -> None:
        """Divide an arena (uint8) among the planes of a layout; None: release the arena."""
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
        # In one statement, so that an interrupt cannot leave the buffer half divided.
        self.arena, self.layout, self.room, self.slots, self.planes = (
            arena,
            layout,
            room,
            found,
            planes,
        )


class StagingBuffers:
    """Two staging buffers on one device: for the storage in use, and for the next storage, as the
    last pass had them in order.

    Queue all reads of a storage's copy before requesting another storage: the request may overwrite
    the copy, after the work queued so far.
    """

    def __init__(self, device: torch.device) -> None:
        self.copies = CopyStream(device)
        self._device = device
        self._current, self._other = _StagingBuffer(), _StagingBuffer()
        self._after: WeakKeyDictionary[OnHost, ref[OnHost]] = WeakKeyDictionary()
        self._needs: WeakKeyDictionary[OnHost, int] = WeakKeyDictionary()  # bytes

    def planes(self, storage: OnHost) -> dict[str, Tensor]:
        """Device copies of a storage's planes, (B, H, room, ...), with its slots in use. Valid
        until another storage is requested.

        Raises:
            OutOfMemoryError: the device has no memory for the copies.
        """
        if not self._current.holds(storage):
            self._enter(storage)
        return self._current.planes

    def slots(self, storage: OnHost) -> dict[str, Tensor]:
        """The copies of `planes`, slots first: (room, B, H, ...)."""
        self.planes(storage)
        return self._current.slots

    def widened(self, storage: OnHost, slots: int) -> dict[str, Tensor]:
        """`planes`, with room for at least `slots` slots.

        Raises:
            OutOfMemoryError: the device has no memory for the slots; nothing was changed.
        """
        self.planes(storage)
        if slots > self._current.room:
            wider, former = _StagingBuffer(), self._current
            self._fit(wider, storage, slots)
            for name, plane in former.slots.items():
                wider.slots[name][: storage.length].copy_(plane[: storage.length])
            wider.owner, self._current = former.owner, wider
        return self._current.planes

    def forget(self, storage: OnHost) -> None:
        """Drop the copies of a storage, because its contents were replaced."""
        for buffer in (self._current, self._other):
            if buffer.holds(storage):
                buffer.owner = None

    def nbytes(self, storage: OnHost) -> int:
        """Bytes of the staging buffers that currently hold a storage."""
        return sum(s.nbytes for s in (self._current, self._other) if s.holds(storage))

    def _enter(self, storage: OnHost) -> None:
        if not self._other.holds(storage):
            self._fetch(storage, self._other)
        last = _alive(self._current.owner)
        self._current, self._other = self._other, self._current
        self.copies.block_compute(self._current.copied)
        if last is not None:
            self._after[last] = ref(storage)
        following = _alive(self._after.get(storage))
        if following is not None and following.length and not self._other.holds(following):
            with suppress(OutOfMemoryError):  # then fetch it when it is requested
                self._fetch(following, self._other)

    def _fetch(self, storage: OnHost, buffer: _StagingBuffer) -> None:
        buffer.owner = None
        storage.write_pending()
        self._fit(buffer, storage, storage.length + 1)
        self.copies.wait_for_compute()  # the device may still read the previous contents
        for name, plane in storage.host.items():
            self.copies.copy(buffer.slots[name][: storage.length], plane[: storage.length])
        buffer.copied, buffer.owner = self.copies.record_event(), ref(storage)

    def _fit(self, buffer: _StagingBuffer, storage: OnHost, slots: int) -> None:
        """Give a buffer room for `slots` slots of a storage. A new buffer is large enough for the
        largest storage."""
        least = slots * sum(p.slot_bytes for p in storage.layout) + _ALIGNED * len(storage.layout)
        largest = max([least, *(n for s, n in self._needs.items() if s is not storage)])
        growth, arena = Growth.on(self._device), buffer.arena
        if buffer.nbytes < least or buffer.nbytes > growth.most * largest:
            arena = None
            buffer.take(None)  # freed before more is allocated
            try:
                arena = reserve((int(growth.grown * largest),), torch.uint8, self._device)
            except SHORTAGE as error:
                held = sum(plane.slot_bytes for plane in storage.layout) * storage.length
                raise out_of_memory(slots, largest, held, self._device) from error
        buffer.take(arena, storage.layout)
        self._needs[storage] = least


@final
class Prefetcher:
    """The staging buffers of a cache's storages: one pair for each device. A copy of a cache gets
    its own buffers."""

    def __init__(self) -> None:
        self._buffers: dict[torch.device, StagingBuffers] = {}
        self._joined: Prefetcher | None = None

    @property
    def shared(self) -> Prefetcher:
        """The prefetcher whose buffers are used: this prefetcher, or the prefetcher it joined."""
        return self if self._joined is None else self._joined.shared

    def buffers(self, device: torch.device) -> StagingBuffers:
        """The staging buffers on a device."""
        found = self.shared._buffers
        if device not in found:
            found[device] = StagingBuffers(device)
        return found[device]

    def join(self, other: Prefetcher) -> None:
        """Use the buffers of another prefetcher."""
        mine, shared = self.shared, other.shared
        if mine is not shared:
            for buffers in mine._buffers.values():
                buffers.copies.finish()  # copies of the other prefetcher do not wait for these
            mine._buffers.clear()
            mine._joined = shared

    def __reduce__(self) -> tuple[type[Prefetcher], tuple[()]]:
        return Prefetcher, ()


def _alive(storage: ref[OnHost] | None) -> OnHost | None:
    return None if storage is None else storage()
