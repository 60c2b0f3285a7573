"""Where a benchmark runs, and what it has there: memory, time, and bandwidth to compare with."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from kvkeep.bench.timing import interleaved, timer_for
from kvkeep.errors import UnsupportedError
from kvkeep.storage.allocate import free_bytes


def device_named(name: str | None = None) -> torch.device:
    """A device to measure on; None: CUDA if there is any, else the CPU.

    Raises:
        UnsupportedError: it is not here.
    """
    cuda = torch.cuda.is_available()
    if name is None:
        name = "cuda" if cuda else "cpu"
    try:
        device = torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        there = "cpu, cuda" if cuda else "cpu"
        raise UnsupportedError(f"no device {name!r} here; there is {there}") from error
    if device.type == "cuda":
        torch.cuda.set_device(device)  # events are recorded on the current one
    return device


class Limits:
    """What a run may use; asked before each part of it, whose rows then say why they are missing.

    Args:
        seconds: from now on; None: as long as it takes.
    """

    def __init__(self, device: torch.device, seconds: float | None = None) -> None:
        self.device, self.seconds = device, seconds
        self._start = time.monotonic()

    def refuse(self, needed: int = 0, seconds: float = 0.0) -> str | None:
        """Why a part that needs so many bytes, and about so many seconds, is skipped, or None."""
        if self.seconds is not None:
            left = max(0.0, self.seconds - (time.monotonic() - self._start))
            if left <= seconds:
                wanted = f"; this takes about {seconds:.0f}" if seconds else ""
                return f"{left:.0f} s of {self.seconds:.0f} are left{wanted}; give it more"
        free = free_bytes(self.device)
        if free is not None and needed > free // 2:
            return f"needs {needed} bytes, more than half of the {free} that are free"
        return None


def because(error: Exception) -> str:
    """An error as the reason of a skipped row."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:200]


def with_values(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows of equal keys, without those for which no row has a value."""
    keys = dict.fromkeys(key for row in rows for key in row)
    kept = [key for key in keys if any(row.get(key) is not None for row in rows)]
    return [{key: row.get(key) for key in kept} for row in rows]


def bandwidth(device: torch.device, mebibytes: int | None = None) -> tuple[str, float]:
    """What memory does at most, in GB/s, and how that is called: reads of all threads together on
    the CPU, the best of several sums of a large float32 tensor; elsewhere the median of copies,
    bytes read and written."""
    if device.type == "cpu":
        x = torch.zeros((mebibytes or 512) << 18)
        best = min(interleaved({"": x.sum}, turns=5, burst=1)[""])
        return "read_gb_per_s", x.nbytes / best / 1e9
    free = free_bytes(device) or 1 << 30
    x = torch.empty(min((mebibytes or 2048) << 20, free // 8), dtype=torch.uint8, device=device)
    y = torch.empty_like(x)
    x.random_()
    seconds = interleaved(
        {"": lambda: y.copy_(x)}, turns=2, burst=10, timer=timer_for(device, queued=True)
    )[""]
    return "copy_gb_per_s", 2 * x.nbytes / statistics.median(seconds) / 1e9
