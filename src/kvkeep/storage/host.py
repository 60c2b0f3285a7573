"""Storage in host memory: keys and values lie there, and come to the device to be attended to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from kvkeep.errors import OutOfMemoryError
from kvkeep.planes import Planes, along_slots, part, plane_bytes, slot_count
from kvkeep.storage.base import Storage
from kvkeep.storage.buffer import device_of, moves
from kvkeep.storage.copy_stream import Landing
from kvkeep.storage.growing import Bounded, Growing, Growth
from kvkeep.storage.prefetch import Courier, Lane, Layout

_HOST = torch.device("cpu")


@final
class Staged(Planes):
    """All slots in use. Planes that lie on the host are brought to the device when they are asked
    for, and are valid until another storage's are."""

    def __init__(self, storage: Host) -> None:
        self._storage, self._near = storage, storage.near.read()
        self._names, self._length = [*self._near, *storage.host], storage.length

    def __getitem__(self, name: str) -> Tensor:
        if name in self._near:
            return self._near[name]
        return self._storage.on_device()[name].narrow(2, 0, self._length)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)  # what is on the device first

    def __len__(self) -> int:
        return len(self._names)


@final
class Host(Storage):
    """Planes of keys and values in pinned host memory, encoded as they are; what else a slot holds
    is on the device. Grows like `growing` on the CPU, though pinned capacity is memory.

    While one storage is read, the next one's slots come to the device, so that of all storages of a
    cache two are there at a time. What is written and evicted is changed on the device first, and
    goes back beside what is computed. `nbytes` counts host memory, device memory, and the copy on
    the device while there is one.

    Args:
        courier: what it shares with the storages read before and after it.
    """

    name: ClassVar[str] = "host"
    lasting: ClassVar[bool] = False

    def __init__(self, *, courier: Courier | None = None) -> None:
        super().__init__()
        self.layout: tuple[Layout, ...] = ()
        self.host: dict[str, Tensor] = {}  # (capacity, B, H, ...): slots in use are one run
        self.near = Growing()
        self._length = 0
        self._device = _HOST
        self._courier = courier or Courier()
        self._landing: Landing | None = None

    @property
    def length(self) -> int:
        return self._length

    @property
    def capacity(self) -> int:
        return min((plane.shape[0] for plane in self.host.values()), default=self.near.capacity)

    def append(self, planes: Planes) -> slice:
        start, stop = self._length, self._length + slot_count(planes)
        heavy = {**_named(planes, "k"), **_named(planes, "v")}
        small = {name: plane for name, plane in planes.items() if name not in heavy}
        if not start:
            self._begin(heavy, device_of(small or heavy))
        views = self._room(stop)
        for name, plane in heavy.items():
            views[name].copy_(plane)
        self.near.append(small)
        self._sent(stop)
        return slice(start, stop)

    def append_in_place(self, count: int, write: Callable[[Planes], None]) -> bool:
        if not self._length:
            return False
        stop = self._length + count
        heavy = self._room(stop)
        if not self.near.append_in_place(count, lambda small: write({**small, **heavy})):
            return False
        self._sent(stop)
        return True

    def write(self, slots: Tensor, planes: Planes) -> None:
        values = {}
        for name, plane in self.on_device().items():
            index = along_slots(slots, plane)
            values[name] = planes[name].expand(index.shape).contiguous()
            plane.scatter_(2, index, values[name])
        self.near.write(slots, planes)
        self._leave(slots, values, self._length)

    def read(self) -> Planes:
        return Staged(self)

    def resting(self) -> Planes:
        self._settled()
        held = {name: plane[: self._length].movedim(0, 2) for name, plane in self.host.items()}
        return {**self.near.read(), **held}

    def on_device(self) -> dict[str, Tensor]:
        """Those of its planes that lie on the host, (B, H, length or more, ...), on the device."""
        return self._lane.planes(self)

    def evict(self, victims: Tensor) -> None:
        planes, kept = self.on_device(), self._length - victims.shape[2]
        # No more than are kept are moved; what is beyond pairs freed slots with freed slots.
        holes, movers = (slots[:, :, :kept] for slots in moves(victims, self._length))
        # All of them before the first is changed: there may be no memory for one.
        moved = {n: plane.gather(2, along_slots(movers, plane)) for n, plane in planes.items()}
        if self.near.length:
            self.near.evict(victims)
        for name, plane in planes.items():
            plane.scatter_(2, along_slots(holes, plane), moved[name])
        self._leave(holes, moved, kept)
        self._length = kept
        self._give_back()

    def truncate(self, length: int) -> None:
        self.land()  # which knows slots that may then be others
        self.near.truncate(length)
        self._length = length
        self._give_back()

    def rows(self, index: Tensor) -> None:
        self._settled()
        layout = tuple(p._replace(shape=(len(index), *p.shape[1:])) for p in self.layout)
        fresh, taken, live = self._reserved(layout, self.capacity), index.to(_HOST), self._length
        for name, plane in self.host.items():
            torch.index_select(plane[:live], 1, taken, out=fresh[name][:live])
        self.near.rows(index)
        self.layout, self.host = layout, fresh
        self._lane.forget(self)

    def _alike(self) -> Host:
        return Host(courier=self._courier)

    def share(self, common: dict[str, Any]) -> None:
        self._courier.join(common.setdefault(self.name, self._courier))

    def reset(self) -> None:
        self._lane.forget(self)
        self.near.reset()
        self._length, self._landing = 0, None
        self.layout, self.host = (), {}

    def land(self) -> None:
        """Put what is on its way to single slots of the host in its place."""
        if self._landing is not None:
            landing, self._landing = self._landing, None
            landing.put(self._lane.side, self.host)

    @property
    def slot_bytes(self) -> int:
        return sum(plane.slot_bytes for plane in self.layout) + self.near.slot_bytes

    @property
    def nbytes(self) -> int:
        return plane_bytes(self.host) + self.near.nbytes + self._lane.nbytes(self)

    def __getstate__(self) -> dict[str, Any]:
        """What copies and pickles of this storage hold: the slots in use, not the spare ones."""
        self._settled()
        live = {name: plane[: self._length].clone() for name, plane in self.host.items()}
        own = {"host": live, "_courier": self._courier.lead, "capacity": self.capacity}
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
    def _lane(self) -> Lane:
        return self._courier.lane(self._device)

    def _begin(self, heavy: Planes, device: torch.device) -> None:
        """Prepare for the first slots."""
        layout = tuple(Layout(n, (*p.shape[:2], *p.shape[3:]), p.dtype) for n, p in heavy.items())
        self.near.bound = self.bound
        if (layout, device) != (self.layout, self._device):
            self.reset()
            self.layout, self._device = layout, device

    def _room(self, stop: int) -> dict[str, Tensor]:
        """Views (B, H, n, ...) of the slots on the device from the first free one to `stop`."""
        if stop > self.capacity or not self.host:
            self._reallocate(self._growth.room(stop))
        planes, start = self._lane.widened(self, stop), self._length
        return {name: plane.narrow(2, start, stop - start) for name, plane in planes.items()}

    def _sent(self, stop: int) -> None:
        """Have slots up to `stop`, and copy the new ones to the host."""
        lane, new = self._lane, slice(self._length, stop)
        self._length = stop
        lane.side.after_compute()
        for name, slots in lane.slots(self).items():
            lane.side.copy(self.host[name][new], slots[new])

    def _leave(self, index: Tensor, values: dict[str, Tensor], limit: int) -> None:
        """Send single slots to the host, to land before its planes are read."""
        self.land()  # what was sent before
        self._landing = Landing.of(self._lane.side, index, values, limit)

    def _settled(self) -> None:
        """Wait until the host holds everything."""
        self._lane.side.finish()
        self.land()

    def _give_back(self) -> None:
        capacity = self._growth.less(self._length, self.capacity)
        if capacity is not None and self.host:
            with suppress(OutOfMemoryError):
                self._reallocate(capacity)

    def _reallocate(self, capacity: int) -> None:
        fresh = self._reserved(self.layout, capacity)
        self._settled()
        for name, plane in self.host.items():
            fresh[name][: self._length] = plane[: self._length]
        self.reallocations += bool(self._length)
        self.host = fresh

    def _reserved(self, layout: tuple[Layout, ...], capacity: int) -> dict[str, Tensor]:
        side = self._lane.side
        return {p.name: side.empty((capacity, *p.shape), p.dtype) for p in layout}


def _named(planes: Planes, prefix: str) -> dict[str, Tensor]:
    return {prefix + name: plane for name, plane in part(planes, prefix).items()}
