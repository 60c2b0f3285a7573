"""Equality to the last bit, which the native kernel promises however slots are divided."""

from __future__ import annotations

import torch
from torch import Tensor

from kvkeep.attention.native import available


def alike(one: Tensor, two: Tensor) -> bool:
    """Whether two tensors are equal; near each other where the native kernel is missing."""
    if available or not one.is_floating_point():
        return one.equal(two)
    return one.shape == two.shape and torch.allclose(one, two, atol=1e-5, rtol=1e-4)
