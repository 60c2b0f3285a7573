"""Measure memory with Linux's counters, in a separate process."""

from __future__ import annotations

import ctypes
import errno
import gc
import mmap
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import TypeVar

from torch import Tensor

from kvkeep.errors import UnsupportedError
from kvkeep.extras import needed_by
from kvkeep.storage.allocate import give_back

with needed_by("Measuring memory", "cli"):
    import psutil

SPARED = 1 << 30
"""Bytes of available memory that a measurement leaves to other processes."""

_Result = TypeVar("_Result")


def require_counters() -> None:
    """Raise UnsupportedError if this system is not Linux."""
    if not sys.platform.startswith("linux"):
        raise UnsupportedError(
            f"resident memory is read from Linux's counters, which {sys.platform} does not have"
        )


def together(calls: Sequence[Callable[[], _Result]]) -> list[_Result]:
    """Make several calls of a module's functions at the same time, each in a new process.

    Raises:
        BrokenProcessPool: a process died.
    """
    with ProcessPoolExecutor(len(calls), mp_context=get_context("spawn")) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


def resident() -> int:
    """Resident bytes, after returning free memory to the system."""
    gc.collect()
    give_back()
    return int(psutil.Process().memory_info().rss)


def in_core(tensors: Iterable[Tensor]) -> int:
    """Bytes of the resident pages of the tensors' whole buffers, each page counted once."""
    page, libc = mmap.PAGESIZE, ctypes.CDLL(None, use_errno=True)
    buffers = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}
    pages, end = 0, 0
    for start, nbytes in sorted(buffers.items()):
        first, end = max(start // page, end), max(-(-(start + nbytes) // page), end)
        if first >= end:
            continue
        found = (ctypes.c_ubyte * (end - first))()
        address, length = ctypes.c_void_p(first * page), ctypes.c_size_t((end - first) * page)
        if libc.mincore(address, length, found):
            raise OSError(ctypes.get_errno(), "mincore")
        pages += sum(byte & 1 for byte in found)
    return pages * page


def peak() -> int:
    """Peak of resident bytes since the last `reset_peak`."""
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def reset_peak() -> None:
    """Set the peak to the current resident bytes."""
    Path("/proc/self/clear_refs").write_text("5")


@contextmanager
def bounded(memory: int | None = None) -> Iterator[None]:
    """Make allocations fail once this process maps `memory` bytes more than now, by MemoryError,
    instead of the system killing a process. None: the available memory minus `SPARED`."""
    import resource  # noqa: PLC0415 - only on Unix

    if memory is None:
        memory = max(0, psutil.virtual_memory().available - SPARED)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limits = [limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY]
    most = min([psutil.Process().memory_info().vms + memory, *limits])
    resource.setrlimit(resource.RLIMIT_AS, (most, hard))
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            raise MemoryError(str(error)) from error
        raise
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that an allocation failed, here or in a library."""
    if isinstance(error, MemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    says = ("allocate memory", "out of memory", "bad_alloc")
    return isinstance(error, RuntimeError) and any(part in str(error) for part in says)
