"""How the processes of a test start and meet; in a module that they can import."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

# What takes seconds to import.
HEAVY = ["torch.distributed.fsdp", "kvkeep.finetune.run", "kvkeep.hf.attach", "peft"]


def start(work: Callable[..., None], processes: int, *args: Any) -> None:
    """Run `work(rank, *args)` in some new processes, until all have ended. They are forks of one
    that only imported, so imports are made once for all tests."""
    multiprocessing.set_forkserver_preload(HEAVY)
    mp.start_processes(work, args=args, nprocs=processes, start_method="forkserver")


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
