"""Geometry: the shape, dtype and device of a layer's keys and values."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Geometry(NamedTuple):
    """Batch rows B, kv heads H, widths Dk and Dv, dtype and device of keys (B, H, n, Dk) and values
    (B, H, n, Dv)."""

    rows: int
    heads: int
    key_width: int
    value_width: int
    dtype: torch.dtype
    device: torch.device = torch.device("cpu")

    @classmethod
    def of(cls, k: Tensor, v: Tensor) -> Geometry:
        """The geometry of keys and values."""
        return cls(k.shape[0], k.shape[1], k.shape[3], v.shape[3], k.dtype, k.device)
