"""Storage in host memory: keys and values are copied to the device for attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from kvkeep.errors import OutOfMemoryError
from kvkeep.planes import Planes, along_slots, moves, part, plane_bytes, slot_count
from kvkeep.storage.base import Storage
from kvkeep.storage.buffer import device_of
from kvkeep.storage.copy_stream import PendingSlots
from kvkeep.storage.growing import Bounded, Growing, Growth
from kvkeep.storage.prefetch import HostPlane, Prefetcher, StagingBuffers

_HOST = torch.device("cpu")


@final
class Staged(Planes):
    """All slots in use. Planes in host memory are copied to the device when they are first read,
    and stay valid until another storage's planes are copied."""

    def __init__(self, storage: Host) -> None:
        self._storage, self._small = storage, storage.small_planes.read()
        self._names, self._length = [*self._small, *storage.host], storage.length

    def __getitem__(self, name: str) -> Tensor:
        if name in self._small:
            return self._small[name]
        return self._storage.on_device()[name].narrow(2, 0, self._length)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)  # planes on the device first

    def __len__(self) -> int:
        return len(self._names)


@final
class Host(Storage):
    """Keeps the encoded planes of keys and values in pinned host memory, and all other planes on
    the device. Grows like `growing` on the CPU, although spare pinned slots occupy memory.

    While one storage is read, the next one's slots are prefetched, so at most two storages of a
    cache have a copy on the device at a time. Writes and evictions change the device copy first,
    and are copied back while the device computes. `nbytes` counts host memory, device memory, and
    the device copy if there is one.

    Args:
        prefetcher: the staging buffers shared with the other storages of the cache.
    """

    name: ClassVar[str] = "host"
    lasting: ClassVar[bool] = False

    def __init__(self, *, prefetcher: Prefetcher | None = None) -> None:
        super().__init__()
        self.layout: tuple[HostPlane, ...] = ()
        self.host: dict[str, Tensor] = {}  # (capacity, B, H, ...): slots in use are contiguous
        self.small_planes = Growing()
        self._length = 0
        self._device = _HOST
        self._prefetcher = prefetcher or Prefetcher()
        self._pending: PendingSlots | None = None

    @property
    def length(self) -> int:
        return self._length

    @property
    def capacity(self) -> int:
        return min(
            (plane.shape[0] for plane in self.host.values()), default=self.small_planes.capacity
        )

    def append(self, planes: Planes) -> slice:
        start, stop = self._length, self._length + slot_count(planes)
        heavy = {**_named(planes, "k"), **_named(planes, "v")}
        small = {name: plane for name, plane in planes.items() if name not in heavy}
        if not start:
            self._begin(heavy, device_of(small or heavy))
        views = self._room(stop)
        for name, plane in heavy.items():
            views[name].copy_(plane)
        self.small_planes.append(small)
        self._send_new(stop)
        return slice(start, stop)

    def append_in_place(self, count: int, write: Callable[[Planes], None]) -> bool:
        if not self._length:
            return False
        stop = self._length + count
        heavy = self._room(stop)
        if not self.small_planes.append_in_place(count, lambda small: write({**small, **heavy})):
            return False
        self._send_new(stop)
        return True

    def write(self, slots: Tensor, planes: Planes) -> None:
        values = {}
        for name, plane in self.on_device().items():
            index = along_slots(slots, plane)
            values[name] = planes[name].expand(index.shape).contiguous()
            plane.scatter_(2, index, values[name])
        self.small_planes.write(slots, planes)
        self._send_slots(slots, values, self._length)

    def read(self) -> Planes:
        return Staged(self)

    def resting(self) -> Planes:
        self._finish_copies()
        held = {name: plane[: self._length].movedim(0, 2) for name, plane in self.host.items()}
        return {**self.small_planes.read(), **held}

    def on_device(self) -> dict[str, Tensor]:
        """Device copies (B, H, length or more, ...) of the planes in host memory."""
        return self._buffers.planes(self)

    def evict(self, victims: Tensor) -> None:
        planes, kept = self.on_device(), self._length - victims.shape[2]
        # The first `kept` pairs are enough: all later pairs copy freed slots to freed slots.
        holes, movers = (slots[:, :, :kept] for slots in moves(victims, self._length))
        # Gather from all planes before changing any, because a gather may run out of memory.
        moved = {n: plane.gather(2, along_slots(movers, plane)) for n, plane in planes.items()}
        if self.small_planes.length:
            self.small_planes.evict(victims)
        for name, plane in planes.items():
            plane.scatter_(2, along_slots(holes, plane), moved[name])
        self._send_slots(holes, moved, kept)
        self._length = kept
        self._give_back()

    def truncate(self, length: int) -> None:
        self.write_pending()  # before the truncation moves or frees the slots
        self.small_planes.truncate(length)
        self._length = length
        self._give_back()

    def rows(self, index: Tensor) -> None:
        self._finish_copies()
        layout = tuple(p._replace(shape=(len(index), *p.shape[1:])) for p in self.layout)
        fresh, taken, live = self._reserved(layout, self.capacity), index.to(_HOST), self._length
        for name, plane in self.host.items():
            torch.index_select(plane[:live], 1, taken, out=fresh[name][:live])
        self.small_planes.rows(index)
        self.layout, self.host = layout, fresh
        self._buffers.forget(self)

    def _alike(self) -> Host:
        return Host(prefetcher=self._prefetcher)

    def share(self, common: dict[str, Any]) -> None:
        self._prefetcher.join(common.setdefault(self.name, self._prefetcher))

    def reset(self) -> None:
        self._buffers.forget(self)
        self.small_planes.reset()
        self._length, self._pending = 0, None
        self.layout, self.host = (), {}

    def write_pending(self) -> None:
        """Write single slots that are still being copied from the device to host memory."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.write(self._buffers.copies, self.host)

    @property
    def slot_bytes(self) -> int:
        return sum(plane.slot_bytes for plane in self.layout) + self.small_planes.slot_bytes

    @property
    def nbytes(self) -> int:
        return plane_bytes(self.host) + self.small_planes.nbytes + self._buffers.nbytes(self)

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles hold the slots in use, without spare slots."""
        self._finish_copies()
        live = {name: plane[: self._length].clone() for name, plane in self.host.items()}
        own = {"host": live, "_prefetcher": self._prefetcher.shared, "capacity": self.capacity}
        return self.__dict__ | own

    def __setstate__(self, state: dict[str, Any]) -> None:
        capacity = state.pop("capacity")
        self.__dict__.update(state)
        if self.host:
            self._reallocate(capacity)
            self.reallocations = state["reallocations"]

    @property
    def _growth(self) -> Growth | Bounded:
        return Growth.on(_HOST) if self.bound is None else Bounded(self.bound)

    @property
    def _buffers(self) -> StagingBuffers:
        return self._prefetcher.buffers(self._device)

    def _begin(self, heavy: Planes, device: torch.device) -> None:
        """Prepare for the first slots; `heavy`: their planes for host memory."""
        layout = tuple(
            HostPlane(n, (*p.shape[:2], *p.shape[3:]), p.dtype) for n, p in heavy.items()
        )
        self.small_planes.bound = self.bound
        if (layout, device) != (self.layout, self._device):
            self.reset()
            self.layout, self._device = layout, device

    def _room(self, stop: int) -> dict[str, Tensor]:
        """Views (B, H, n, ...) of the slots on the device from the first free one to `stop`."""
        if stop > self.capacity or not self.host:
            self._reallocate(self._growth.room(stop))
        planes, start = self._buffers.widened(self, stop), self._length
        return {name: plane.narrow(2, start, stop - start) for name, plane in planes.items()}

    def _send_new(self, stop: int) -> None:
        """Count the slots up to `stop` as in use, and copy the new slots to the host."""
        buffers, new = self._buffers, slice(self._length, stop)
        self._length = stop
        buffers.copies.wait_for_compute()
        for name, slots in buffers.slots(self).items():
            buffers.copies.copy(self.host[name][new], slots[new])

    def _send_slots(self, index: Tensor, values: dict[str, Tensor], limit: int) -> None:
        """Start copying single slots to the host; `write_pending` writes them to its planes."""
        self.write_pending()  # of the previous call
        self._pending = PendingSlots.send(self._buffers.copies, index, values, limit)

    def _finish_copies(self) -> None:
        """Wait until host memory holds all slots."""
        self._buffers.copies.finish()
        self.write_pending()

    def _give_back(self) -> None:
        capacity = self._growth.less(self._length, self.capacity)
        if capacity is not None and self.host:
            with suppress(OutOfMemoryError):
                self._reallocate(capacity)

    def _reallocate(self, capacity: int) -> None:
        fresh = self._reserved(self.layout, capacity)
        self._finish_copies()
        for name, plane in self.host.items():
            fresh[name][: self._length] = plane[: self._length]
        self.reallocations += bool(self._length)
        self.host = fresh

    def _reserved(self, layout: tuple[HostPlane, ...], capacity: int) -> dict[str, Tensor]:
        copies = self._buffers.copies
        return {p.name: copies.empty((capacity, *p.shape), p.dtype) for p in layout}


def _named(planes: Planes, prefix: str) -> dict[str, Tensor]:
    return {prefix + name: plane for name, plane in part(planes, prefix).items()}
