"""An error of one process of a group is raised in all of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from kvkeep.errors import KVKeepError


class PeerError(KVKeepError):
    """The error of another process, which ends all processes of a group."""


@contextmanager
def together(group: dist.ProcessGroup | None, device: torch.device) -> Iterator[None]:
    """A context for a group of processes: if one raises in it, all raise.

    Args:
        group: the processes; None: this process alone.
        device: device for exchanging tensors.

    Raises:
        PeerError: another process raised, with the text of its error.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as raised:
        error = raised
    if group is not None:
        text = "" if error is None else str(error) or type(error).__name__
        said = bytearray(text.encode(errors="backslashreplace"))
        own, ranks = dist.get_rank(group), dist.get_process_group_ranks(group)
        failed = torch.zeros(len(ranks), dtype=torch.int64, device=device)
        failed[own] = len(said)
        dist.all_reduce(failed, group=group)
        for rank in failed.nonzero().flatten().tolist()[:1]:
            told = said if rank == own else bytearray(int(failed[rank]))
            words = torch.frombuffer(told, dtype=torch.uint8).to(device)
            dist.broadcast(words, ranks[rank], group)
            if error is None:
                raise PeerError(bytes(words.tolist()).decode())
    if error is not None:
        raise error
