"""How the processes of a test start and meet; in a module that they can import."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

_starter: list[Connection] = []


def prepare() -> None:
    """Fork a process that starts the tests' processes. It has imported what the tests import, which
    takes seconds, but has run none of them: forks of a process with threads may hang."""
    if not hasattr(os, "fork"):
        return
    ours, theirs = multiprocessing.Pipe()
    if os.fork():
        theirs.close()
        _starter[:] = [ours]
        return
    try:
        ours.close()
        torch.set_num_threads(1)  # a fork has none of its parent's other threads
        while True:
            work, args, processes = theirs.recv()
            try:
                mp.start_processes(work, args=args, nprocs=processes, start_method="fork")
            except Exception as error:
                theirs.send(error)
            else:
                theirs.send(None)
    finally:  # the tests have ended
        os._exit(0)


def start(work: Callable[..., None], processes: int, *args: Any) -> None:
    """Run `work(rank, *args)` in some new processes, until all have ended."""
    (starter,) = _starter
    starter.send((work, args, processes))
    if error := starter.recv():
        raise error


def execute(rank: int, code: str, arguments: list[str], places: list[str]) -> None:
    """Run a program in one of these processes, as `python -c` does in a new one."""
    sys.path[:0] = places
    sys.argv = ["-c", *arguments]
    exec(code, {"__name__": "__main__"})


def join(rank: int, processes: int, path: str) -> None:
    """Join the gloo group of a test's processes, each of one thread, which meet in a directory."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{path}/meet",
        rank=rank,
        world_size=processes,
        timeout=timedelta(seconds=300),
    )
