"""Keep the tokens that the newest query attends to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import torch

from kvkeep.planes import Planes
from kvkeep.policy.base import Need, Observation
from kvkeep.policy.rule import Enter, Learn, Rule
from kvkeep.policy.scored import SCORE, Scored


@final
@dataclass(frozen=True)
class Tova(Scored):
    """Score: the newest query's attention, averaged over all heads, so all heads keep the same
    tokens. Source: TOVA (arXiv 2401.06104).
    """

    name: ClassVar[str] = "tova"
    needs: ClassVar[frozenset[Need]] = frozenset({Need.MASS})
    per_head: ClassVar[bool] = False

    @property
    def observed(self) -> int:
        return 1

    @property
    def rule(self) -> Rule | None:
        return Rule({SCORE: Enter.ZERO}, Learn.MEAN)

    def observe(self, planes: Planes, seen: Observation) -> None:
        assert seen.mass is not None
        mass, fed = seen.mass.mean(dim=1, keepdim=True), seen.fed()
        if not isinstance(fed, int):  # a row with only padding has no query
            mass = torch.where(fed > 0, mass, planes[SCORE])
        planes[SCORE].copy_(mass)
