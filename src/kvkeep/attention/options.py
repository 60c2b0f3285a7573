"""The options of a call of `attend`, which are checked once and passed to the backend."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Options(NamedTuple):
    """`scale` multiplies q.k; `softcap` c makes scores c tanh(x / c); `sinks` (Hq,) are logits.

    The mass counts the newest `observed` real queries (position >= 0) of each row in the chunk;
    None: all. With `peak` it is not the sum over these queries, averaged over the group, but the
    largest weight of all.
    """

    scale: float
    softcap: float | None = None
    sinks: Tensor | None = None
    need_mass: bool = False
    observed: int | None = None
    peak: bool = False
