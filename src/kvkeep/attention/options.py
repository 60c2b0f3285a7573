"""What `attend` was asked for, checked once and handed to the backend."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Options(NamedTuple):
    """`scale` multiplies q.k; `softcap` c makes scores c tanh(x / c); `sinks` (Hq,) are logits."""

    scale: float
    softcap: float | None = None
    sinks: Tensor | None = None
    need_mass: bool = False
