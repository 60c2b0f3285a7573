"""Rotary offsets: attend to keys at shifted positions by rotating the few queries instead."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rotation:
    """A segment whose keys were rotated for positions `offset` before those they now stand at.

    q . R(d)k = (R(-d)q) . k, so `turn` gives the query that sees such keys `offset` later.

    Args:
        offset: d, in positions; may be negative.
        inv_freq: (R/2,) angular frequencies of the model's rotary embedding; R <= D, the
            dimensions from R on are not rotated.
        interleaved: pairs are (0, 1), (2, 3), ... instead of (i, i + R/2).

    Source: RoFormer (arXiv 2104.09864).
    """

    offset: int
    inv_freq: Tensor
    interleaved: bool = False

    def turn(self, q: Tensor) -> Tensor:
        """R(-offset) applied to q (..., D), computed in at least float32; a copy."""
        half = self.inv_freq.shape[0]
        dtype = torch.promote_types(q.dtype, torch.float32)
        angle = -self.offset * self.inv_freq.to(device=q.device, dtype=dtype)
        cos, sin = angle.cos(), angle.sin()
        turning = q[..., : 2 * half].to(dtype)
        if self.interleaved:
            a, b = turning[..., 0::2], turning[..., 1::2]
            turned = torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)
        else:
            a, b = turning[..., :half], turning[..., half:]
            turned = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
        return torch.cat([turned.to(q.dtype), q[..., 2 * half :]], dim=-1)
