"""Keep random tokens: a baseline that any other policy should beat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from kvkeep.errors import SpecError
from kvkeep.planes import Planes
from kvkeep.policy.base import Arrivals
from kvkeep.policy.rule import Enter, Rule
from kvkeep.policy.scored import SCORE, Scored

_BITS = 0xFFFFFFFF


@final
@dataclass(frozen=True)
class Random(Scored):
    """Score: a hash of the token's position, its head and `seed`, so runs are reproducible."""

    seed: int = 0

    name: ClassVar[str] = "random"
    rollback: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.seed < 2**31:
            raise SpecError(f"random seed {self.seed}: it must be from 0 to 2**31 - 1; use seed=0")

    @property
    def rule(self) -> Rule | None:
        return Rule({SCORE: Enter.HASH}, seed=self.seed)

    def enter(self, tokens: Arrivals) -> Planes:
        rows, heads, n, _ = tokens.keys.shape
        place = tokens.position.to(torch.int64).reshape(-1, 1, n)
        head = torch.arange(heads, device=place.device)[:, None]
        mixed = _mixed(_mixed(place + (self.seed << 8)) + head)
        return {SCORE: (mixed >> 8).float().expand(rows, -1, -1)}


def _mixed(x: Tensor) -> Tensor:
    """A 32-bit hash of int64 x. Source: Wellons' lowbias32."""
    x = x & _BITS
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _BITS
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _BITS
    return x ^ (x >> 16)
