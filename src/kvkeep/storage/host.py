"""Storage in host memory: keys and values are copied to the device for attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from kvkeep.errors import OutOfMemoryError
from kvkeep.planes import Planes, along_slots, moves, part, slot_count
from kvkeep.storage.base import Storage
from kvkeep.storage.buffer import device_of
from kvkeep.storage.growing import Bounded, Growing, Growth
from kvkeep.storage.host_planes import HostPlanes
from kvkeep.storage.prefetch import Prefetcher

_HOST = torch.device("cpu")


@final
class Staged(Planes):
    """All slots in use. Planes in host memory are copied to the device when they are first read,
    and stay valid until another storage's planes are copied."""

    def __init__(self, large: HostPlanes, small: Planes) -> None:
        self._large, self._small, self._length = large, small, large.length
        self._names = [*small, *large.host]  # planes on the device first

    def __getitem__(self, name: str) -> Tensor:
        if name in self._small:
            return self._small[name]
        return self._large.on_device()[name].narrow(2, 0, self._length)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

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
        self.large_planes = HostPlanes(prefetcher or Prefetcher())
        self.small_planes = Growing()

    @property
    def length(self) -> int:
        return self.large_planes.length

    @property
    def capacity(self) -> int:
        large = self.large_planes.host.values()
        return min((len(plane) for plane in large), default=self.small_planes.capacity)

    def append(self, planes: Planes) -> slice:
        start, stop = self.length, self.length + slot_count(planes)
        large = {**_named(planes, "k"), **_named(planes, "v")}
        small = {name: plane for name, plane in planes.items() if name not in large}
        if not start:
            self.small_planes.bound = self.bound
            self.large_planes.lay_out(large, device_of(small or large))
        views = self._room(stop)
        for name, plane in large.items():
            views[name].copy_(plane)
        self.small_planes.append(small)
        self.large_planes.send_new(stop)
        return slice(start, stop)

    def append_in_place(self, count: int, write: Callable[[Planes], None]) -> bool:
        if not self.length:
            return False
        stop = self.length + count
        large = self._room(stop)
        if not self.small_planes.append_in_place(count, lambda small: write({**small, **large})):
            return False
        self.large_planes.send_new(stop)
        return True

    def write(self, slots: Tensor, planes: Planes) -> None:
        values = {}
        for name, plane in self.large_planes.on_device().items():
            index = along_slots(slots, plane)
            values[name] = planes[name].expand(index.shape).contiguous()
            plane.scatter_(2, index, values[name])
        self.small_planes.write(slots, planes)
        self.large_planes.send_slots(slots, values, self.length)

    def read(self) -> Planes:
        return Staged(self.large_planes, self.small_planes.read())

    def resting(self) -> Planes:
        return {**self.small_planes.read(), **self.large_planes.resting()}

    def evict(self, victims: Tensor) -> None:
        large, kept = self.large_planes, self.length - victims.shape[2]
        planes = large.on_device()
        # The first `kept` pairs are enough: all later pairs copy freed slots to freed slots.
        holes, movers = (slots[:, :, :kept] for slots in moves(victims, self.length))
        # Gather from all planes before changing any, because a gather may run out of memory.
        moved = {n: plane.gather(2, along_slots(movers, plane)) for n, plane in planes.items()}
        if self.small_planes.length:
            self.small_planes.evict(victims)
        for name, plane in planes.items():
            plane.scatter_(2, along_slots(holes, plane), moved[name])
        large.send_slots(holes, moved, kept)
        large.length = kept
        self._give_back()

    def truncate(self, length: int) -> None:
        self.large_planes.write_pending()  # before the truncation moves or frees the slots
        self.small_planes.truncate(length)
        self.large_planes.length = length
        self._give_back()

    def rows(self, index: Tensor) -> None:
        copies = self.large_planes.with_rows(index, self.capacity)
        self.small_planes.rows(index)  # memory may run out, so before any plane is replaced
        self.large_planes.hold(*copies)

    def _alike(self) -> Host:
        return Host(prefetcher=self.large_planes.prefetcher)

    def share(self, common: dict[str, Any]) -> None:
        own = self.large_planes.prefetcher
        own.join(common.setdefault(self.name, own))

    def reset(self) -> None:
        self.large_planes.reset()
        self.small_planes.reset()

    @property
    def live_bytes(self) -> int:
        return self.length * self.large_planes.slot_bytes + self.small_planes.live_bytes

    @property
    def nbytes(self) -> int:
        return self.large_planes.nbytes + self.small_planes.nbytes

    @property
    def _growth(self) -> Growth | Bounded:
        return Growth.on(_HOST) if self.bound is None else Bounded(self.bound)

    def _room(self, stop: int) -> dict[str, Tensor]:
        """Views (B, H, n, ...) of the large planes' slots on the device, from the first free one to
        `stop`."""
        if stop > self.capacity or not self.large_planes.host:
            self._reallocate(self._growth.room(stop))
        return self.large_planes.room(stop)

    def _give_back(self) -> None:
        capacity = self._growth.less(self.length, self.capacity)
        if capacity is not None and self.large_planes.host:
            with suppress(OutOfMemoryError):
                self._reallocate(capacity)

    def _reallocate(self, capacity: int) -> None:
        self.large_planes.reallocate(capacity)
        self.reallocations += bool(self.length)


def _named(planes: Planes, prefix: str) -> dict[str, Tensor]:
    return {prefix + name: plane for name, plane in part(planes, prefix).items()}
