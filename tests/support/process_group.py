"""How the processes of a test meet; in a module that they can import."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist


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
