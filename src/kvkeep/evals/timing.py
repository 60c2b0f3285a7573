"""Timing on a noisy machine: interleaved in one process, medians, and ratios pair by pair."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

System = TypeVar("System", bound=Hashable)


def interleaved(
    systems: Mapping[System, Callable[[], object]], *, turns: int = 10, burst: int = 10
) -> dict[System, list[float]]:
    """Seconds of each call. The systems take turns, so that drift hits them alike, and each turn
    is a burst of calls, so that none is timed with the caches another one left; the first turn of
    each is not counted."""
    seconds: dict[System, list[float]] = {name: [] for name in systems}
    for turn in range(turns + 1):
        for name, call in systems.items():
            for _ in range(burst):
                start = time.perf_counter()
                call()
                elapsed = time.perf_counter() - start
                if turn:
                    seconds[name].append(elapsed)
    return seconds


def spread(seconds: list[float]) -> float:
    """Width of the middle half."""
    quarters = statistics.quantiles(seconds, n=4)
    return quarters[2] - quarters[0]


def median_ratio(slow: list[float], fast: list[float]) -> float:
    """Median of the paired ratios slow / fast."""
    return statistics.median(a / b for a, b in zip(slow, fast, strict=True))
