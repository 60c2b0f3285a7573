"""Models whose forwards are computed by several processes: by tensor or expert parallelism."""

from __future__ import annotations

from typing import Any

from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate

_KEYS = ("k_proj", "qkv_proj", "query_key_value")
"""Names of the layers that compute keys, in plans for tensor parallelism."""


def is_parallel(model: Any) -> bool:
    """Whether each process computes a part of every forward, with a part of the weights.

    FSDP2 alone does not count, because it gathers the weights before they are used.
    """
    by_data = any(isinstance(module, FSDPModule) for module in model.modules())
    return any(
        sum(not isinstance(one, Replicate) for one in x.placements) > by_data
        for x in model.parameters()
        if isinstance(x, DTensor)
    )


def head_processes(model: Any) -> int:
    """The number of processes over which transformers has split the kv heads of each layer; 1:
    every process computes all heads."""
    size = getattr(model, "_tp_size", None) or 1
    plan = getattr(model, "_tp_plan", None) or {}
    split = any(
        name.rpartition(".")[2] in _KEYS and style == "colwise" for name, style in plan.items()
    )
    return size if split else 1
