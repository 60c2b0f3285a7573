"""Token ids that are drawn at random, of a tiny model's vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor


def ids(rows: int = 1, n: int = 30, seed: int = 3) -> Tensor:
    """Token ids (rows, n)."""
    return torch.randint(2, 96, (rows, n), generator=torch.Generator().manual_seed(seed))


def row(n: int, seed: int = 3) -> Tensor:
    """Token ids (n,)."""
    return ids(1, n, seed)[0]
