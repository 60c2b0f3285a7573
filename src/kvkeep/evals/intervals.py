"""Confidence intervals of 95 %."""

from __future__ import annotations

import math

import torch
from torch import Tensor

Z = 1.959964
"""The normal distribution's quantile of 97.5 %."""

_BLOCK = 16
_RESAMPLES = 2000


def of_share(share: float, count: int) -> tuple[float, float]:
    """The interval of a mean of `count` scores from 0 to 1.

    Wilson's score interval (J. Am. Stat. Assoc. 22, 1927), which stays sensible at 0 and 1 and for
    few samples. It is for scores of 0 or 1; for scores between them it is too wide, if anything.
    """
    spread = Z * math.sqrt(share * (1 - share) / count + Z * Z / (4 * count * count))
    middle, scale = share + Z * Z / (2 * count), 1 + Z * Z / count
    return max(0.0, (middle - spread) / scale), min(1.0, (middle + spread) / scale)


def of_mean(values: Tensor) -> tuple[float, float]:
    """The interval of the mean of (B, N) values, of which those near each other in a row are alike.

    A bootstrap of blocks (H. R. Künsch, Ann. Stat. 17, 1989): rows are cut into blocks of 16 values
    (fewer in rows of less than 128), and as many blocks are drawn with replacement 2,000 times. The
    draws are always the same ones.
    """
    values = values.double()
    block = max(1, min(_BLOCK, values.shape[1] // 8))
    blocks = [part for row in values for part in row.split(block)]
    sums = torch.stack([part.sum() for part in blocks])
    sizes = torch.tensor([len(part) for part in blocks], dtype=sums.dtype)
    draw = torch.Generator().manual_seed(0)
    chosen = torch.randint(len(blocks), (_RESAMPLES, len(blocks)), generator=draw)
    means = sums[chosen].sum(1) / sizes[chosen].sum(1)
    low, high = means.quantile(torch.tensor([0.025, 0.975], dtype=means.dtype)).tolist()
    return low, high
