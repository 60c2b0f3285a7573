"""Copies between a device and the host, beside what the device computes."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvkeep.errors import OutOfMemoryError
from kvkeep.storage.allocate import REMEDY, SHORTAGE, free_bytes, reserve

_HOST = torch.device("cpu")


class Side:
    """Copies between a device and the host, made one after another beside what the device computes.

    On CUDA they have a stream of their own, and memory of the host is pinned; elsewhere each is
    made at once.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if cuda else None  # type: ignore[no-untyped-call]

    def after_compute(self) -> None:
        """Let the copies from here on wait for all that was asked of the device so far."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def copy(self, to: Tensor, x: Tensor) -> None:
        """Copy x over `to`: both contiguous, of one shape and dtype."""
        if self._stream is None:
            to.copy_(x)
            return
        with torch.cuda.stream(self._stream):
            to.copy_(x, non_blocking=True)
        for used in (to, x):
            if used.is_cuda:  # it is not given to others before the copy was made
                used.record_stream(self._stream)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Uninitialised memory of the host, to copy to and from.

        Raises:
            OutOfMemoryError: there is none, or it cannot be pinned. From other memory each copy
                would wait for all that is computed.
        """
        try:
            return self._reserve(shape, dtype)
        except (*SHORTAGE, RuntimeError) as error:  # the last of which pinning raises
            raise OutOfMemoryError(
                f"{math.prod(shape) * dtype.itemsize} bytes of host memory needed, where "
                f"{free_bytes(_HOST)} are free: {error}; {REMEDY}"
            ) from error

    def _reserve(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if self._stream is None:
            return reserve(shape, dtype, _HOST)
        with torch.inference_mode(False):
            return torch.empty(shape, dtype=dtype, device=_HOST, pin_memory=True)

    def mark(self) -> Any:
        """The place behind all copies so far."""
        return None if self._stream is None else self._stream.record_event()

    def before_compute(self, mark: Any) -> None:
        """Let what is asked of the device from here on wait for the copies before a mark."""
        if mark is not None:
            torch.cuda.current_stream(self._device).wait_event(mark)

    def finish(self, mark: Any = None) -> None:
        """Return when the copies before a mark are made; None: all of them."""
        if self._stream is not None:
            (mark or self._stream).synchronize()


class Landing(NamedTuple):
    """Single slots on their way to the host, `values` (B, H, n, ...) of each plane, to be put at
    `place`, int64 (B|1, H|1, n), as far as that is below `limit`."""

    mark: Any
    place: Tensor
    values: dict[str, Tensor]
    limit: int

    @classmethod
    def of(cls, side: Side, place: Tensor, values: dict[str, Tensor], limit: int) -> Landing:
        """Send them from the device; nobody waits, unless there is no pinned memory left for them:
        an eviction that has been decided must not fail."""
        sources = [place.contiguous(), *values.values()]
        side.after_compute()  # which includes what has just made `place` contiguous
        there = []
        for x in sources:
            try:
                there.append(side.empty(tuple(x.shape), x.dtype))
            except OutOfMemoryError:
                there.append(torch.empty(x.shape, dtype=x.dtype, device=_HOST))
            side.copy(there[-1], x)
        sent = dict(zip(values, there[1:], strict=True))
        return cls(side.mark(), there[0], sent, limit)

    def put(self, side: Side, planes: dict[str, Tensor]) -> None:
        """Wait until they are there, and put them into planes (capacity, B, H, ...)."""
        side.finish(self.mark)
        for name, plane in planes.items():
            place = self.place.expand(plane.shape[1], plane.shape[2], -1)
            row, head, nth = (place < self.limit).nonzero(as_tuple=True)
            plane[place[row, head, nth], row, head] = self.values[name][row, head, nth]
