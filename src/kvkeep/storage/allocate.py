"""Allocates buffers whose unused part occupies no memory, and words errors if memory is short."""

from __future__ import annotations

import ctypes
import math
import mmap
from contextlib import suppress

import torch
from torch import Tensor

from kvkeep.errors import MissingPackageError, OutOfMemoryError
from kvkeep.extras import needed_by

SHORTAGE = (torch.OutOfMemoryError, MemoryError, OSError)
"""The errors of `reserve` if memory is short: on an accelerator, and on the CPU for small and for
large buffers."""

_LEAST_MAPPED = 1 << 18  # below 256 KiB a mapping saves no more than the allocator's rounding

REMEDY = (
    "use a policy with a budget, such as h2o:4096, or a codec (+int8 halves bfloat16, +int8/int4 "
    "takes 2.5 times less)"
)


def reserve(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """An uninitialised tensor that a cache fills from the front. Raises an error of `SHORTAGE` if
    memory is short.

    On the CPU a large tensor is an anonymous mapping of its own: pages become resident when they
    are first written, and return to the system with the tensor, however fragmented the allocator's
    heap is. Huge pages are declined, because a huge page would make 2 MiB of unused slots resident.
    On an accelerator the whole buffer occupies memory. The result is never an inference tensor, so
    that a cache can be filled in one mode and continued in another.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    with torch.inference_mode(False):
        if device.type != "cpu" or nbytes < _LEAST_MAPPED:
            return torch.empty(shape, dtype=dtype, device=device)
        if not hasattr(mmap, "MAP_PRIVATE"):
            return torch.frombuffer(mmap.mmap(-1, nbytes), dtype=dtype).view(shape)
        # Private: with the default flags a forked child's writes would reach its parent.
        pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_NOHUGEPAGE"):
            pages.madvise(mmap.MADV_NOHUGEPAGE)
        return torch.frombuffer(pages, dtype=dtype).view(shape)


def available_host_bytes() -> int:
    """Bytes of host memory that can be allocated without swapping.

    Raises:
        MissingPackageError: the system is not Linux, and psutil is not installed.
    """
    with suppress(OSError, ValueError, StopIteration), open("/proc/meminfo") as lines:
        line = next(line for line in lines if line.startswith("MemAvailable:"))
        return int(line.split()[1]) * 1024
    with needed_by("The size of the free memory", "cli"):
        import psutil  # noqa: PLC0415 (it may be missing, and Linux does not need it)
    return int(psutil.virtual_memory().available)


def free_bytes(device: torch.device) -> int | None:
    """Bytes that can still be allocated on `device`; None: unknown."""
    if device.type == "cpu":
        try:
            return available_host_bytes()
        except MissingPackageError:
            return None
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + cached


def out_of_memory(slots: int, needed: int, held: int, device: torch.device) -> OutOfMemoryError:
    """The error for `needed` bytes for `slots` slots that cannot be allocated; slots in use take
    `held` bytes."""
    free = free_bytes(device)
    return OutOfMemoryError(
        f"{slots} slots of a layer need {needed} bytes on {device}, where "
        f"{'too few' if free is None else free} are free and its live slots hold {held}; {REMEDY}"
        + ("" if device.type == "cpu" else ", or keep the slots in host memory by @host")
    )


def give_back() -> None:
    """Return freed memory that the C library (glibc) still holds to the system."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
