"""Rotary offsets: attend to keys at shifted positions by rotating the few queries instead."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvkeep.rotary import Rotary


@dataclass(frozen=True)
class Rotation:
    """A segment whose keys were rotated for positions `offset` before those they now stand at.

    q . R(d)k = (R(-d)q) . k, so `turn` gives the query that sees such keys `offset` later.

    Args:
        offset: d, in positions; may be negative.
        inv_freq: (R/2,) angular frequencies of the model's rotary embedding; see `Rotary`.
        interleaved: how dimensions are paired; see `Rotary`.
    """

    offset: int
    inv_freq: Tensor
    interleaved: bool = False

    def turn(self, q: Tensor) -> Tensor:
        """R(-offset) applied to q (..., D), computed in at least float32; a copy."""
        return Rotary(self.inv_freq, self.interleaved).turn(q, torch.tensor(-self.offset))

    def turned_keys(self, k: Tensor) -> Tensor:
        """R(offset) applied to k (..., D): the keys as they are where they now stand; a copy."""
        return Rotary(self.inv_freq, self.interleaved).turn(k, torch.tensor(self.offset))
