"""Keep the keys of small norm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from torch import Tensor

from kvkeep.planes import Planes
from kvkeep.policy.base import Arrivals, Observation
from kvkeep.policy.scored import SCORE, Scored


@final
@dataclass(frozen=True)
class KNorm(Scored):
    """Score: -|k|; a key of small norm tends to receive much attention. Source: L2 norm compression
    (arXiv 2406.11430).
    """

    name: ClassVar[str] = "knorm"
    rollback: ClassVar[bool] = True

    def enter(self, tokens: Arrivals) -> Planes:
        return {SCORE: -tokens.keys.float().norm(dim=-1)}

    def score(self, planes: Planes, seen: Observation) -> Tensor:
        return planes[SCORE]
