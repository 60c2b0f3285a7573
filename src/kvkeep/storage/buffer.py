"""The base of growing and fixed storage: planes with spare slots, written in place."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from struct import Struct
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvkeep.errors import ShapeError
from kvkeep.native_library import LIBRARY
from kvkeep.planes import Front, Planes, along_slots, moves, slot_count
from kvkeep.storage.allocate import SHORTAGE, out_of_memory, reserve
from kvkeep.storage.base import Storage, require_within

_MOST_VIEWS = 8  # views made at once; each takes about a kilobyte
_PLANE = Struct("=5q")  # KvSlots of native/abi.h


class _SlotViews:
    """Views of single slots. Decoding asks for consecutive slots, so the views of several slots are
    made at once, which takes little more time than one."""

    def __init__(self) -> None:
        self._made: tuple[int, Sequence[Planes]] = (0, ())  # the first slot, and views from it on

    def of(self, slot: int, planes: Planes) -> Planes:
        """Views (B, H|1, 1, ...) of a slot of `planes`, which are the same in all calls."""
        first, views = self._made
        if not first <= slot < first + len(views):
            count = min(_MOST_VIEWS, slot_count(planes) - slot)
            with torch.inference_mode(False), torch.no_grad():
                split = [
                    torch.split(plane.narrow(2, slot, count), 1, dim=2) for plane in planes.values()
                ]
            views = [dict(zip(planes, slots, strict=True)) for slots in zip(*split, strict=True)]
            first, self._made = slot, (slot, views)
        return views[slot - first]


class Buffer(Storage):
    """Planes (B, H|1, capacity, ...) of which the first `length` slots are in use.

    `read` is a view of the buffer. An append copies only the new slots, as long as they fit.
    """

    reserves: ClassVar[bool] = True

    def __init__(self) -> None:
        super().__init__()
        self._length = 0
        self._views = _SlotViews()
        self._addresses: bytes | None = None  # the result of `described`

    @abstractmethod
    def _capacity_for(self, slots: int, device: torch.device) -> int:
        """Slots to allocate so that `slots` fit; raises CapacityError if they exceed `limit`."""

    @property
    def length(self) -> int:
        return self._length

    def described(self) -> bytes | None:
        if self._addresses is None and LIBRARY is not None:
            planes = self._planes.values()
            if planes and all(plane.is_cpu for plane in planes):
                self._addresses = slots_record(self._planes)
        return self._addresses

    def extend_to(self, length: int) -> None:
        self._length = length

    def reserve(self, slots: int) -> None:
        require_within(self.limit, slots)
        if slots > self.capacity:
            self._reallocate(slots, self._planes)

    def grow_for(self, slots: int) -> None:
        self._fit(slots, self._planes)

    def adopt(self, planes: Planes, length: int) -> None:
        self._length = length
        if any(self._planes.get(name) is not plane for name, plane in planes.items()):
            self._hold(dict(planes))

    def append(self, planes: Planes) -> slice:
        start = self._length
        if not start and not _alike(self._planes, planes):
            self._hold({})
        stop = start + slot_count(planes)
        slots = self._spare(stop, planes)
        for name, plane in planes.items():
            slots[name].copy_(plane)
        self._length = stop
        return slice(start, stop)

    def append_in_place(self, count: int, write: Callable[[Planes], None]) -> bool:
        if not self._length:
            return False
        stop = self._length + count
        write(self._spare(stop, self._planes))
        self._length = stop
        return True

    def write(self, slots: Tensor, planes: Planes) -> None:
        for name, plane in self._planes.items():
            index = along_slots(slots, plane)
            plane.scatter_(2, index, planes[name].expand(index.shape))

    def read(self) -> Planes:
        return Front(self._planes, self._length)

    def evict(self, victims: Tensor) -> None:
        if self.described() is not None:
            _evict_in_one_call(self, victims, self._length)
            return
        holes, movers = moves(victims, self._length)
        # Gather from all planes before changing any, because a gather may run out of memory.
        moved = [plane.gather(2, along_slots(movers, plane)) for plane in self._planes.values()]
        for plane, slots in zip(self._planes.values(), moved, strict=True):
            plane.scatter_(2, along_slots(holes, plane), slots)
        self._length -= victims.shape[2]

    def append_evicting(self, planes: Planes, victims: Tensor) -> None:
        if self.described() is None:
            super().append_evicting(planes, victims)
            return
        slots = self._length + slot_count(planes)
        kept = slots - victims.shape[2]
        self._fit(kept, self._planes)
        behind = slots_record({name: planes[name] for name in self._planes})
        _evict_in_one_call(self, victims, slots, behind)

    def truncate(self, length: int) -> None:
        self._length = length

    def rows(self, index: Tensor) -> None:
        planes = dict(self._planes)
        for name, plane in self._planes.items():
            live = plane.narrow(2, 0, self._length)
            if len(index) == plane.shape[0]:
                live.copy_(live.index_select(0, index))
                continue
            shape = (len(index), *plane.shape[1:])
            try:
                planes[name] = fresh = reserve(shape, plane.dtype, plane.device)
            except SHORTAGE as error:
                rows = len(index) * (self.nbytes // max(1, plane.shape[0]))
                raise out_of_memory(self.capacity, rows, self.live_bytes, plane.device) from error
            fresh.narrow(2, 0, self._length).copy_(live.index_select(0, index))
        self._hold(planes)  # after all are copied, so that an error changes nothing

    def reset(self) -> None:
        self._hold({})
        self._length = 0

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles hold the slots in use, without spare slots."""
        live = {name: plane.clone() for name, plane in self.read().items()}
        volatile = {"_planes": live, "_views": _SlotViews(), "_addresses": None}
        return self.__dict__ | volatile | {"capacity": self.capacity}

    def __setstate__(self, state: dict[str, Any]) -> None:
        live, capacity = state["_planes"], state.pop("capacity")
        self.__dict__.update(state, _planes={}, _length=0)
        if live:
            self._reallocate(capacity, live)
            self.append(live)

    def _spare(self, stop: int, like: Planes) -> Planes:
        """Views (B, H|1, n, ...) of the slots from the first free one to `stop`."""
        start = self._length
        self._fit(stop, self._planes or like)
        if stop - start == 1:
            return self._views.of(start, self._planes)
        return {name: p.narrow(2, start, stop - start) for name, p in self._planes.items()}

    def _fit(self, slots: int, like: Planes) -> None:
        """Allocate at least `slots` slots with the planes of `like`, and some spare ones."""
        if slots > self.capacity:
            self._reallocate(self._capacity_for(slots, device_of(like)), like)

    def _hold(self, planes: dict[str, Tensor]) -> None:
        """Use other planes. Views and addresses of the former planes are forgotten."""
        self._views, self._addresses = _SlotViews(), None
        self._planes = planes

    def _reallocate(self, capacity: int, like: Planes) -> None:
        """Move the slots in use to new buffers of `capacity` slots, with the planes of `like`.

        Raises:
            OutOfMemoryError: there is not enough memory; the slots in use are unchanged.
        """
        before, live, planes = self.capacity, self._length, self._planes
        self._hold(planes)
        try:
            for name, plane in like.items():  # one by one: only one plane exists twice at a time
                planes[name] = _resized(plane, capacity, live if name in planes else 0)
        except BaseException as error:
            if before:
                _level(planes, min(before, capacity), live)
            else:
                self._hold({})
            if not isinstance(error, SHORTAGE):
                raise
            needed = sum(p[:, :, :1].numel() * p.element_size() for p in like.values()) * capacity
            raise out_of_memory(capacity, needed, self.live_bytes, device_of(like)) from error
        self.reallocations += bool(before)


def _alike(planes: Planes, others: Planes) -> bool:
    """Whether planes agree in names, rows, heads, widths, dtypes and devices."""
    return planes.keys() == others.keys() and all(
        (p.shape[:2], p.shape[3:], p.dtype, p.device)
        == (q.shape[:2], q.shape[3:], q.dtype, q.device)
        for p, q in ((plane, others[name]) for name, plane in planes.items())
    )


def _resized(plane: Tensor, capacity: int, live: int) -> Tensor:
    """A buffer of `capacity` slots, with copies of the first `live` slots of `plane`."""
    fresh = reserve((*plane.shape[:2], capacity, *plane.shape[3:]), plane.dtype, plane.device)
    fresh.narrow(2, 0, live).copy_(plane.narrow(2, 0, live))
    return fresh


def _level(planes: dict[str, Tensor], capacity: int, live: int) -> None:
    """After a failed reallocation, cut planes that were already enlarged to `capacity`."""
    for name, plane in planes.items():
        if plane.shape[2] > capacity:
            try:
                planes[name] = _resized(plane, capacity, live)
            except SHORTAGE:  # keep the larger buffer
                planes[name] = plane.narrow(2, 0, capacity)


def _evict_in_one_call(
    storage: Buffer, victims: Tensor, slots: int, behind: bytes | None = None
) -> None:
    """Evict from `slots` slots, of which the slots from `storage.length` on lie in the planes that
    `behind` describes. The storage is `described`."""
    assert LIBRARY is not None
    planes = storage.read()
    heads = max(plane.shape[1] for plane in planes.values())
    rows = next(iter(planes.values())).shape[0]
    if (
        victims.dtype != torch.int64
        or not victims.is_cpu
        or victims.shape[0] not in (1, rows)
        or victims.shape[1] not in (1, heads)
    ):
        raise ShapeError(
            f"victims {tuple(victims.shape)} {victims.dtype} on {victims.device}: a policy must "
            f"give int64 ({rows} or 1, {heads} or 1, count) on the slots' device"
        )
    victims = victims.contiguous()
    place, own, described = victims.data_ptr(), storage.length, storage.described()
    failed = LIBRARY.kv_evict(
        described, len(planes), rows, place, *victims.shape, slots, behind, own
    )
    if failed == 1:
        raise MemoryError(f"no scratch memory to evict {victims.shape[2]} slots")
    if failed:
        storage.remaining(victims, slots)  # raises the error that says which are wrong
    storage.extend_to(slots - victims.shape[2])


def slots_record(planes: Planes) -> bytes:
    """The addresses and strides of `planes`, as KvSlots of native/abi.h."""
    return b"".join(
        _PLANE.pack(
            plane.data_ptr(),
            plane.stride(0) * plane.element_size(),
            plane.stride(1) * plane.element_size(),
            plane.stride(2) * plane.element_size(),
            plane.shape[1],
        )
        for plane in planes.values()
    )


def device_of(planes: Planes) -> torch.device:
    """The device of `planes`."""
    return next(iter(planes.values())).device
