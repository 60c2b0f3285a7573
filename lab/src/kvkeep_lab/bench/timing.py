"""Timing on a noisy machine: calls interleaved in one process, medians, and paired ratios."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

System = TypeVar("System", bound=Hashable)

Call = Callable[[], object]
Timer = Callable[[Call], float]
"""Makes a call and returns its seconds."""

_CACHES = 256 << 20  # bytes; more than a device's last-level cache
_FEWEST_CYCLES, _MOST_CYCLES = 1 << 17, 1 << 24  # cycles of a device's clock: 0.1 to 10 ms


def on_host(call: Call, clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds by a clock of the host, for calls that are complete when they return."""
    start = clock()
    call()
    return clock() - start


@contextmanager
def using_threads(count: int) -> Iterator[None]:
    """Let torch compute with this number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Events:
    """Seconds by a CUDA device's events.

    Before each call, a buffer larger than the device's caches is written, so that each call starts
    with cold caches.

    Args:
        queued: True keeps the device busy until the whole call is queued, so that the time is the
            device's own. False starts the call on an idle device, so that the time includes all
            launches.
        cuda: the `torch.cuda` module or a substitute for it.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        queued: bool = False,
        caches: int = _CACHES,
        cuda: Any = torch.cuda,
    ) -> None:
        self._cuda, self._queued, self._cycles = cuda, queued, _FEWEST_CYCLES
        self._scratch = torch.empty(caches, dtype=torch.uint8, device=device)

    def __call__(self, call: Call) -> float:
        start, end = (self._cuda.Event(enable_timing=True) for _ in range(2))
        self._scratch.fill_(1)
        if self._queued:
            self._cuda._sleep(self._cycles)
        else:
            self._cuda.synchronize()
        start.record()
        call()
        end.record()
        if self._queued and start.query():  # the device ran out of work before the call was queued
            self._cycles = min(2 * self._cycles, _MOST_CYCLES)
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3


def timer_for(device: torch.device, *, queued: bool = False) -> Timer:
    """The timer for calls on a device; `queued` as for `Events`."""
    return Events(device, queued=queued) if device.type == "cuda" else on_host


def captured(call: Call) -> Call:
    """The replay of a call that was captured as a CUDA graph: its device work without launches.

    Raises the call's own error if it cannot be captured.
    """
    stream: Any = torch.cuda.Stream
    aside = stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):  # warm up, so that nothing is initialised during capture
            call()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()

    def replay(inputs: Call = call) -> None:  # keeps the call's tensors alive with the graph
        graph.replay()

    return replay


def interleaved(
    systems: Mapping[System, Call],
    *,
    turns: int = 10,
    burst: int = 10,
    timer: Timer = on_host,
    tick: Callable[[float], None] = lambda share: None,
) -> dict[System, list[float]]:
    """Seconds of each call. Systems are measured in turn, so that drift affects all alike. Each
    turn is a burst of calls, so that few of them start with caches that another system filled. The
    first turn of each system is not counted. `tick` is called after each burst, with its share of
    all."""
    seconds: dict[System, list[float]] = {name: [] for name in systems}
    for turn in range(turns + 1):
        for name, call in systems.items():
            for _ in range(burst):
                elapsed = timer(call)
                if turn:
                    seconds[name].append(elapsed)
            tick(1 / ((turns + 1) * len(systems)))
    return seconds


def medians_of(systems: Mapping[System, Call], **options: Any) -> dict[System, float]:
    """The median seconds of each call, as `interleaved` measures them."""
    found = interleaved(systems, **options)
    return {name: statistics.median(seconds) for name, seconds in found.items()}


def spread(seconds: list[float]) -> float:
    """The interquartile range."""
    quarters = statistics.quantiles(seconds, n=4)
    return quarters[2] - quarters[0]


def median_ratio(slow: list[float], fast: list[float]) -> float:
    """Median of the paired ratios slow / fast."""
    return statistics.median(a / b for a, b in zip(slow, fast, strict=True))
