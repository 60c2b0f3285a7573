"""Planes in host memory, of which a device has a copy while they are read or written."""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor

from kvkeep.planes import Planes, plane_bytes
from kvkeep.storage.copy_stream import PendingSlots
from kvkeep.storage.prefetch import HostPlane, Prefetcher, StagingBuffers

_HOST = torch.device("cpu")


@final
class HostPlanes:
    """Planes in pinned host memory, slots first: (capacity, B, H, ...), so that slots in use are
    contiguous. The device copy is changed first; host memory follows while the device computes.

    Args:
        prefetcher: the staging buffers shared with the other storages of the cache.
    """

    def __init__(self, prefetcher: Prefetcher) -> None:
        self.layout: tuple[HostPlane, ...] = ()
        self.host: dict[str, Tensor] = {}
        self.length = 0  # slots in use
        self.device = _HOST
        self.prefetcher = prefetcher
        self._pending: PendingSlots | None = None

    @property
    def buffers(self) -> StagingBuffers:
        """The staging buffers that hold the device copy."""
        return self.prefetcher.buffers(self.device)

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot."""
        return sum(plane.slot_bytes for plane in self.layout)

    @property
    def nbytes(self) -> int:
        """Bytes allocated in host memory, and those of the device copy, if there is one."""
        return plane_bytes(self.host) + self.buffers.nbytes(self)

    def lay_out(self, planes: Planes, device: torch.device) -> None:
        """Prepare for the first slots, `planes` (B, H, n, ...), with a copy on `device`."""
        layout = tuple(
            HostPlane(n, (*p.shape[:2], *p.shape[3:]), p.dtype) for n, p in planes.items()
        )
        if (layout, device) != (self.layout, self.device):
            self.reset()
            self.layout, self.device = layout, device

    def on_device(self) -> dict[str, Tensor]:
        """Device copies (B, H, length or more, ...)."""
        return self.buffers.planes(self)

    def resting(self) -> Planes:
        """The slots in use in host memory, (B, H, length, ...)."""
        self._finish_copies()
        return {name: plane[: self.length].movedim(0, 2) for name, plane in self.host.items()}

    def room(self, stop: int) -> dict[str, Tensor]:
        """Views (B, H, n, ...) of the slots on the device from the first free one to `stop`."""
        planes, start = self.buffers.widened(self, stop), self.length
        return {name: plane.narrow(2, start, stop - start) for name, plane in planes.items()}

    def send_new(self, stop: int) -> None:
        """Count the slots up to `stop` as in use, and copy the new slots to the host."""
        buffers, new = self.buffers, slice(self.length, stop)
        self.length = stop
        buffers.copies.wait_for_compute()
        for name, slots in buffers.slots(self).items():
            buffers.copies.copy(self.host[name][new], slots[new])

    def send_slots(self, index: Tensor, values: dict[str, Tensor], limit: int) -> None:
        """Start copying single slots to the host; `write_pending` writes them to its planes."""
        self.write_pending()  # of the previous call
        self._pending = PendingSlots.send(self.buffers.copies, index, values, limit)

    def write_pending(self) -> None:
        """Write single slots that are still being copied from the device to host memory."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.write(self.buffers.copies, self.host)

    def reallocate(self, capacity: int) -> None:
        """Move the slots in use to new memory for `capacity` slots."""
        fresh = self._reserved(self.layout, capacity)
        self._finish_copies()
        for name, plane in self.host.items():
            fresh[name][: self.length] = plane[: self.length]
        self.host = fresh

    def with_rows(
        self, index: Tensor, capacity: int
    ) -> tuple[tuple[HostPlane, ...], dict[str, Tensor]]:
        """Copies for `hold`, with the former row index[i] as row i and `capacity` slots."""
        self._finish_copies()
        layout = tuple(p._replace(shape=(len(index), *p.shape[1:])) for p in self.layout)
        fresh, taken = self._reserved(layout, capacity), index.to(_HOST)
        for name, plane in self.host.items():
            torch.index_select(plane[: self.length], 1, taken, out=fresh[name][: self.length])
        return layout, fresh

    def hold(self, layout: tuple[HostPlane, ...], host: dict[str, Tensor]) -> None:
        """Replace the planes, and drop the device copy."""
        self.buffers.forget(self)
        self.layout, self.host = layout, host

    def reset(self) -> None:
        """Free every slot."""
        self.hold((), {})
        self.length, self._pending = 0, None

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles hold the slots in use, without spare slots."""
        self._finish_copies()
        live = {name: plane[: self.length].clone() for name, plane in self.host.items()}
        capacity = min((len(plane) for plane in self.host.values()), default=0)
        own = {"host": live, "prefetcher": self.prefetcher.shared, "capacity": capacity}
        return self.__dict__ | own

    def __setstate__(self, state: dict[str, Any]) -> None:
        capacity = state.pop("capacity")
        self.__dict__.update(state)
        if self.host:
            self.reallocate(capacity)

    def _finish_copies(self) -> None:
        """Wait until host memory holds all slots."""
        self.buffers.copies.finish()
        self.write_pending()

    def _reserved(self, layout: tuple[HostPlane, ...], capacity: int) -> dict[str, Tensor]:
        copies = self.buffers.copies
        return {p.name: copies.empty((capacity, *p.shape), p.dtype) for p in layout}
