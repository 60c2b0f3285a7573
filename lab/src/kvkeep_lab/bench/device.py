"""A benchmark's device, its limits of memory and time, and the device's bandwidth."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch

from kvkeep.host import placement
from kvkeep.storage.allocate import free_bytes
from kvkeep_lab.bench.timing import Call, interleaved, timer_for

_Result = TypeVar("_Result")

READ_MEBIBYTES = 512
"""The size of the tensor that `bandwidth` reads on a CPU."""
SQUARE = 1024
"""The width of the matrices that `arithmetic` multiplies on a CPU."""


def device_named(name: str | None = None) -> torch.device:
    """The device to measure on; see `kvkeep.host.placement.device_named`."""
    device = placement.device_named(name)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # events are recorded on the current one
    return device


class Limits:
    """Limits of a run, checked before each case: time, memory, and whether the device still works.
    A case that is refused or fails is reported as skipped.

    Args:
        seconds: time limit from now on; None: none.
    """

    def __init__(self, device: torch.device, seconds: float | None = None) -> None:
        self.device, self.seconds, self.failed = device, seconds, False
        self._start = time.monotonic()

    def refuse(self, needed: int = 0, seconds: float = 0.0) -> str | None:
        """The reason to skip a case that needs `needed` bytes and about `seconds`; None: run it."""
        if self.failed:
            return "the device has failed"
        if self.seconds is not None:
            left = max(0.0, self.seconds - (time.monotonic() - self._start))
            if left <= seconds:
                wanted = f"; this takes about {seconds:.0f}" if seconds else ""
                return f"{left:.0f} s of {self.seconds:.0f} are left{wanted}; allow more seconds"
        free = free_bytes(self.device)
        if free is not None and needed > free // 2:
            return f"needs {needed} bytes, more than half of the {free} that are free"
        return None

    def attempt(
        self, case: Callable[[], _Result], needed: int | None = 0, seconds: float = 0.0
    ) -> tuple[_Result | None, str | None]:
        """The result of a case, or the reason why it was refused or failed. On the CPU only missing
        packages are a reason; other errors raise.

        Args:
            needed, seconds: see `refuse`; `needed` None: the case has started and is not refused.
        """
        reason = None if needed is None else self.refuse(needed, seconds)
        if reason is not None:
            return None, reason
        try:
            return case(), None
        except Exception as error:
            if self.device.type == "cpu" and not isinstance(error, ImportError):
                raise
            try:
                torch.zeros(1, device=self.device).item()
            except Exception:
                self.failed = True
            return None, because(error)


def because(error: Exception) -> str:
    """An error in one line, as the reason why a row was skipped."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:200]


def with_values(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rows with the same keys each, without the keys for which no row has a value."""
    keys = dict.fromkeys(key for row in rows for key in row)
    kept = [key for key in keys if any(row.get(key) is not None for row in rows)]
    return [{key: row.get(key) for key in kept} for row in rows]


def bandwidth(device: torch.device) -> tuple[str, float]:
    """The memory bandwidth in GB/s, with the name of the measurement. On the CPU: reads by all
    threads, the best of several sums of a large float32 tensor. Elsewhere: the median of copies,
    counting bytes read and written."""
    if device.type == "cpu":
        x = torch.zeros(READ_MEBIBYTES << 18)
        best = min(interleaved({"": x.sum}, turns=5, burst=1)[""])
        return "read_gb_per_s", x.nbytes / best / 1e9
    free = free_bytes(device) or 1 << 30
    x = torch.empty(min(2048 << 20, free // 8), dtype=torch.uint8, device=device)
    y = torch.empty_like(x)
    x.random_()
    seconds = interleaved(
        {"": lambda: y.copy_(x)}, turns=2, burst=10, timer=timer_for(device, queued=True)
    )[""]
    return "copy_gb_per_s", 2 * x.nbytes / statistics.median(seconds) / 1e9


def arithmetic(device: torch.device, dtype: torch.dtype) -> float:
    """GFLOP/s of torch's products of square matrices in float32 or in `dtype`, whichever is faster;
    the best of several on the CPU, elsewhere the median."""
    on_cpu = device.type == "cpu"
    n = SQUARE if on_cpu else 8192
    calls: dict[torch.dtype, Call] = {}
    for each in dict.fromkeys((torch.float32, dtype)):
        a, b = (torch.randn(n, n, dtype=each, device=device) for _ in range(2))
        calls[each] = partial(torch.matmul, a, b)
    timer = timer_for(device, queued=True)
    found = interleaved(calls, turns=5, burst=1, timer=timer).values()
    return 2 * n**3 / min(min(x) if on_cpu else statistics.median(x) for x in found) / 1e9
