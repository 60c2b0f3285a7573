"""Rotary embeddings, which encode the positions of queries and keys."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rotary:
    """A model's rotary embedding.

    Args:
        inv_freq: (R/2,) angular frequencies of the R rotated dimensions.
        interleaved: whether the pairs of rotated dimensions are (0, 1), (2, 3), ... instead of
            (i, i + R/2).
        first: index of the first rotated dimension.
        beside: the rotation of further dimensions, such as of an index's key behind a key.

    Source: RoFormer (arXiv 2104.09864).
    """

    inv_freq: Tensor
    interleaved: bool = False
    first: int = 0
    beside: Rotary | None = None

    @property
    def turns(self) -> bool:
        """Whether any dimension is rotated."""
        return len(self.inv_freq) > 0 or (self.beside is not None and self.beside.turns)

    def turn(self, x: Tensor, by: Tensor) -> Tensor:
        """Rotate x (..., D) forward by `by` positions, which broadcasts to (...). Returns a copy in
        x's dtype, computed in at least float32."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        angle = by.to(x.device, dtype)[..., None] * self.inv_freq.to(x.device, dtype)
        turned = self.scaled(x, angle.cos(), angle.sin())
        return turned if self.beside is None else self.beside.turn(turned, by)

    def scaled(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Like `turn`, with given cosines and sines (..., R/2), which may be averages; `beside` is
        not used."""
        half = self.inv_freq.shape[0]
        before, turning, after = x.tensor_split([self.first, self.first + 2 * half], dim=-1)
        turning = turning.to(cos.dtype)
        if self.interleaved:
            a, b = turning[..., 0::2], turning[..., 1::2]
            turned = torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)
        else:
            a, b = turning[..., :half], turning[..., half:]
            turned = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
        return torch.cat([before, turned.to(x.dtype), after], dim=-1)
