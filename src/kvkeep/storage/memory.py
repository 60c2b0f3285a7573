"""Buffers whose untouched part costs address space, not memory."""

from __future__ import annotations

import ctypes
import math
import mmap

import torch
from torch import Tensor

_PAGES_WORTH_MAPPING = 1 << 18  # below 256 KiB the allocator's own rounding is of the same size


def reserve(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """An uninitialised tensor for a cache to fill from the front.

    On the CPU a large one is its own anonymous mapping: pages become resident when they are first
    written and go back to the system with the tensor, whatever the allocator's heap looks like.
    Huge pages are declined, because one of them would make 2 MiB of untouched slots resident.
    The result is an ordinary tensor also under `torch.inference_mode`, so that a cache can be
    filled in one mode and continued in another.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    with torch.inference_mode(False):
        if device.type != "cpu" or nbytes < _PAGES_WORTH_MAPPING:
            return torch.empty(shape, dtype=dtype, device=device)
        if not hasattr(mmap, "MAP_PRIVATE"):
            return torch.frombuffer(mmap.mmap(-1, nbytes), dtype=dtype).view(shape)
        # Private, for the default would share a forked child's writes with its parent.
        pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_NOHUGEPAGE"):
            pages.madvise(mmap.MADV_NOHUGEPAGE)
        return torch.frombuffer(pages, dtype=dtype).view(shape)


def give_back() -> None:
    """Return to the system what the C library keeps of memory that was freed, as glibc's does."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
