"""Chooses the number of threads by the cores that other processes leave idle, and by a container's
CPU limit.

OpenMP's threads wait for each other at the end of every operation. If another process occupies the
core of one thread, all other threads spin until it runs again, and a decode step takes many times
as long as on one thread. So the number of threads follows the load while text is generated.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import ceil, inf
from pathlib import Path
from threading import Lock, local
from time import monotonic, process_time, sleep
from typing import NamedTuple

import torch

OFF = "KVKEEP_THREADS"
"""The environment variable; "fixed" keeps the number of threads constant."""

_STAT, _GROUPS = Path("/proc/stat"), Path("/sys/fs/cgroup")
_LEAST_S = 0.15
"""The shortest time over which load is measured: ticks are 10 ms long."""

_GIVE_UP, _TAKE_BACK = 0.35, 0.15
"""Shares of a core: the number of threads is reduced when other processes use more than the first
share of one more core, and raised when they use less than the second."""


class Load(NamedTuple):
    """Processor time so far, in seconds.

    Args:
        at: the time of reading, of the monotonic clock.
        busy: time used by all processes on the cores that this process may use, and by other
            virtual machines.
        own: time used by this process.
        cores: number of cores that this process may use.
        quota: seconds of processor time per second that the control groups of this process, such
            as a container's, allow.
    """

    at: float
    busy: float
    own: float
    cores: int
    quota: float = inf


def read_load() -> Load | None:
    """The load now; None if the system does not report it."""
    try:
        lines = _STAT.read_text(encoding="ascii").splitlines()
        cores = {f"cpu{core}" for core in os.sched_getaffinity(0)}
        ticks = os.sysconf("SC_CLK_TCK")  # per second
    except (OSError, AttributeError):
        return None
    busy = 0
    for line in lines[1:]:
        name, *fields = line.split()
        if not name.startswith("cpu"):
            break
        if name in cores:
            user, nice, system, _, _, *rest = map(int, fields[:8])  # without idle and iowait
            busy += user + nice + system + sum(rest)
    return Load(monotonic(), busy / ticks, process_time(), len(cores), read_quota())


def read_quota(mount: Path = _GROUPS, own: Path = Path("/proc/self/cgroup")) -> float:
    """The seconds of processor time per second that this process's control groups allow.

    Args:
        mount: where control groups are mounted, of version 2, or of version 1 by controller.
        own: the file that names this process's groups.
    """
    try:
        lines = own.read_text(encoding="utf-8").splitlines()
    except OSError:
        return inf
    least = inf
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if not controllers or "cpu" in controllers.split(","):
            root = mount / "cpu" if controllers else mount
            # In a container, the group may be mounted at the root instead of under its name.
            group = root / name.lstrip("/")
            groups = (x for x in (group, *group.parents) if x.is_relative_to(root))
            least = min([least, *map(_quota_of, groups)])
    return least


def _quota_of(group: Path) -> float:
    try:
        if (group / "cpu.max").exists():
            quota, period = (group / "cpu.max").read_text(encoding="ascii").split()
        else:
            quota, period = (
                (group / f"cpu.cfs_{name}_us").read_text(encoding="ascii")
                for name in ("quota", "period")
            )
        return int(quota) / int(period) if int(quota) > 0 else inf
    except (OSError, ValueError):  # no such file, or "max"
        return inf


class Governor:
    """Counts the cores that other processes occupy.

    Args:
        read: reads the load.
        clock: the time in seconds.
    """

    def __init__(
        self, read: Callable[[], Load | None] = read_load, clock: Callable[[], float] = monotonic
    ) -> None:
        self._read, self._clock = read, clock
        self._last, self._taken = read(), 0
        self._running = 0  # number of generations that follow the load
        self._lock = Lock()

    def threads(self, most: int) -> int:
        """The number of threads, at most `most`, that each running generation should use."""
        with self._lock:
            self._measure()
            last = self._last
            idle = most if last is None else min(last.cores - self._taken, last.quota)
            return int(max(1, min(most, idle // max(1, self._running))))

    def count(self, generations: int) -> None:
        """Add to the number of generations that follow the load."""
        with self._lock:
            self._running += generations

    def _measure(self) -> None:
        last = self._last
        if last is None or self._clock() - last.at < _LEAST_S:
            return
        load = self._read()
        if load is None:
            return
        others = (load.busy - last.busy - (load.own - last.own)) / (load.at - last.at)
        self._last = load
        if others > self._taken:
            self._taken = max(self._taken, ceil(others - _GIVE_UP))
        else:
            self._taken = min(self._taken, max(0, ceil(others - _TAKE_BACK)))


_governor = Governor()
_followed = local()


@contextmanager
def following_load(governor: Governor | None = None) -> Iterator[Callable[[], None]]:
    """A context that yields a function to call before each step: it sets torch's number of threads,
    for this Python thread, by the load. The context restores the number at its end.

    The user's number of threads is the maximum. kvkeep's results do not depend on the number, but
    torch's matrix products may round differently; so with torch's deterministic algorithms the
    number does not change.
    """
    governor = governor or _governor
    outer = getattr(_followed, "adapt", None)
    fixed = os.environ.get(OFF) == "fixed" or torch.are_deterministic_algorithms_enabled()
    if outer is not None or fixed or torch.get_num_threads() == 1:
        yield outer or _nothing
        return
    before = now = torch.get_num_threads()

    def adapt() -> None:
        nonlocal before, now
        if torch.get_num_threads() != now:  # the user has changed it
            before = torch.get_num_threads()
        now = governor.threads(before)
        if now != torch.get_num_threads():
            torch.set_num_threads(now)

    _followed.adapt = adapt
    governor.count(1)
    try:
        yield adapt
    finally:
        governor.count(-1)
        _followed.adapt = None
        if torch.get_num_threads() == now != before:
            torch.set_num_threads(before)


def advised(most: int) -> int:
    """The number of threads, at most `most`, that a generation would use now; takes 0.2 seconds."""
    governor = Governor()
    sleep(0.2)
    return governor.threads(most)


def _nothing() -> None:
    """Do not change the number of threads."""
