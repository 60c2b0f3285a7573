"""The Hadamard rotation, which spreads an outlier channel over all channels before quantisation."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor


def hadamard(x: Tensor) -> Tensor:
    """Rotate x (..., D) by the orthonormal Walsh-Hadamard matrix, which is its own inverse.

    A width that is not a power of two is divided into blocks of the largest power of two that
    divides it. Returns at least float32. Source: QuaRot (arXiv 2404.00456).
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    return x.to(dtype) @ _matrix(x.shape[-1], dtype, x.device)


@cache  # never freed: CUDA graphs hold its address
def _matrix(width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    block = width & -width
    with torch.inference_mode(False):
        rotation = torch.ones(1, 1, dtype=dtype)
        while rotation.shape[0] < block:
            rotation = torch.cat(
                [torch.cat([rotation, rotation], 1), torch.cat([rotation, -rotation], 1)]
            )
        identity = torch.eye(width // block, dtype=dtype)
        return torch.kron(identity, rotation * block**-0.5).to(device)
