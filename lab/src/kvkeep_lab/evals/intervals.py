"""Confidence intervals of 95 %."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import torch
from torch import Tensor

Z = 1.959964
"""The normal distribution's quantile of 97.5 %."""

_BLOCK = 16
_RESAMPLES = 2000


def of_share(share: float, count: int) -> tuple[float, float]:
    """The interval of a mean of `count` scores from 0 to 1.

    Wilson's score interval (J. Am. Stat. Assoc. 22, 1927), which stays sensible at 0 and 1 and for
    few samples. It is for scores of 0 or 1; for scores between them, or of different expectations,
    it is too wide, if anything.
    """
    spread = Z * math.sqrt(share * (1 - share) / count + Z * Z / (4 * count * count))
    middle, scale = share + Z * Z / (2 * count), 1 + Z * Z / count
    return max(0.0, (middle - spread) / scale), min(1.0, (middle + spread) / scale)


def of_scores(scores: Sequence[float]) -> tuple[float, float]:
    """The interval of the mean of independent scores from 0 to 1.

    Wilson's, if all are 0 or 1. Otherwise Student's (Biometrika 6, 1908), cut to 0 to 1: its width
    follows from how much the scores differ. Equal scores, or a single one, do not show how much
    others would differ; then Wilson's, because scores differ most if they are 0 and 1. Student's is
    too narrow for few scores (less than ten) of which most are alike and some far off.
    """
    mean, count = statistics.fmean(scores), len(scores)
    if len(set(scores)) == 1 or all(score in (0, 1) for score in scores):
        return of_share(mean, count)
    spread = _student(count - 1) * statistics.stdev(scores) / math.sqrt(count)
    return max(0.0, mean - spread), min(1.0, mean + spread)


def _student(freedom: int) -> float:
    """The quantile of 97.5 % of Student's distribution, to 1e-9."""
    low, high = Z, 13.0  # above that of one degree of freedom, 12.71
    while high - low > 1e-9:
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, freedom) < 0.95 else (low, middle)
    return high


def _within(t: float, freedom: int) -> float:
    """The probability of -t to t in Student's distribution: 26.7.3 and 26.7.4 of M. Abramowitz and
    I. A. Stegun, Handbook of Mathematical Functions (1964)."""
    angle = math.atan(t / math.sqrt(freedom))
    odd = freedom % 2
    term, total = (math.cos(angle), 0.0) if odd else (1.0, 0.0)
    for k in range(odd + 1, freedom, 2):
        total += term
        term *= k / (k + 1) * math.cos(angle) ** 2
    return (angle + math.sin(angle) * total) * 2 / math.pi if odd else math.sin(angle) * total


def of_mean(values: Tensor) -> tuple[float, float]:
    """The interval of the mean of (B, N) values; neighbours in a row are alike.

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
