"""Copies between a device and the host that overlap with computation."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvkeep.errors import OutOfMemoryError
from kvkeep.storage.allocate import REMEDY, SHORTAGE, free_bytes, reserve

_HOST = torch.device("cpu")


class CopyStream:
    """Makes copies between a device and the host, in the order in which they are requested.

    On CUDA, copies run on a separate stream and host memory is pinned. On any other device, copies
    are synchronous.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if cuda else None  # type: ignore[no-untyped-call]

    def wait_for_compute(self) -> None:
        """Make the copies that follow wait for all work queued on the current stream so far."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def copy(self, to: Tensor, x: Tensor) -> None:
        """Copy x to `to`; both are contiguous, of the same shape and dtype."""
        if self._stream is None:
            to.copy_(x)
            return
        with torch.cuda.stream(self._stream):
            to.copy_(x, non_blocking=True)
        for used in (to, x):
            if used.is_cuda:  # the allocator must not reuse the memory before the copy is done
                used.record_stream(self._stream)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Uninitialised host memory to copy to and from.

        Raises:
            OutOfMemoryError: memory is short, or cannot be pinned. Copies of memory that is not
                pinned would not overlap with computation.
        """
        try:
            return self._reserve(shape, dtype)
        except (*SHORTAGE, RuntimeError) as error:  # pinning raises RuntimeError
            raise OutOfMemoryError(
                f"{math.prod(shape) * dtype.itemsize} bytes of host memory needed, but "
                f"{free_bytes(_HOST)} are free: {error}; {REMEDY}"
            ) from error

    def _reserve(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if self._stream is None:
            return reserve(shape, dtype, _HOST)
        with torch.inference_mode(False):
            return torch.empty(shape, dtype=dtype, device=_HOST, pin_memory=True)

    def record_event(self) -> Any:
        """An event after all copies requested so far; None: copies are synchronous."""
        return None if self._stream is None else self._stream.record_event()

    def block_compute(self, event: Any) -> None:
        """Make all later work on the current stream wait for an event."""
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)

    def finish(self, event: Any = None) -> None:
        """Return once the copies before an event are done; None: all copies."""
        if self._stream is not None:
            (event or self._stream).synchronize()


class PendingSlots(NamedTuple):
    """Single slots that are being copied to the host: `values` (B, H, n, ...) of each plane, to be
    written to the indices `slots`, int64 (B|1, H|1, n). Indices of `limit` or more are skipped."""

    event: Any
    slots: Tensor
    values: dict[str, Tensor]
    limit: int

    @classmethod
    def send(
        cls, copies: CopyStream, slots: Tensor, values: dict[str, Tensor], limit: int
    ) -> PendingSlots:
        """Start copying the values of slots from the device. If no pinned memory is left, the copy
        is synchronous instead of failing, because the eviction has already been decided."""
        sources = [slots.contiguous(), *values.values()]
        copies.wait_for_compute()  # including `slots.contiguous()`
        there = []
        for x in sources:
            try:
                there.append(copies.empty(tuple(x.shape), x.dtype))
            except OutOfMemoryError:
                there.append(torch.empty(x.shape, dtype=x.dtype, device=_HOST))
            copies.copy(there[-1], x)
        sent = dict(zip(values, there[1:], strict=True))
        return cls(copies.record_event(), there[0], sent, limit)

    def write(self, copies: CopyStream, planes: dict[str, Tensor]) -> None:
        """Wait for the copies, and write the slots to planes (capacity, B, H, ...)."""
        copies.finish(self.event)
        for name, plane in planes.items():
            slots = self.slots.expand(plane.shape[1], plane.shape[2], -1)
            row, head, nth = (slots < self.limit).nonzero(as_tuple=True)
            plane[slots[row, head, nth], row, head] = self.values[name][row, head, nth]
