"""H2O with the attention weighted by the norm of the value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from kvkeep.planes import Planes, PlaneSpec, norms
from kvkeep.policy.base import Arrivals, Observation
from kvkeep.policy.h2o import H2O
from kvkeep.policy.rule import Enter, Learn, Rule
from kvkeep.policy.scored import SCORE

NORM = "value_norm"


@dataclass(frozen=True)
class VLen(H2O):
    """Score: the sum over steps of n m |v| / sum(m |v|), where m is the mass that a slot received
    from the step's n queries. Source: keys_values' VLengthH2O.
    """

    name: ClassVar[str] = "vlen"

    @property
    def planes(self) -> dict[str, PlaneSpec]:
        return super().planes | {NORM: PlaneSpec((), torch.float32)}

    @property
    def rule(self) -> Rule | None:
        enter = {SCORE: Enter.ZERO, NORM: Enter.VALUE_NORM}
        return Rule(enter, Learn.WEIGHTED, by_query=self.normalize)

    def enter(self, tokens: Arrivals) -> Planes:
        return {**super().enter(tokens), NORM: norms(tokens.values)}

    def observe(self, planes: Planes, seen: Observation) -> None:
        assert seen.mass is not None
        moved = seen.mass * planes[NORM]
        moved = torch.where(moved > 0, moved, 0)  # a value may be NaN, also in an empty slot
        total = moved.sum(dim=-1, keepdim=True)
        planes[SCORE].add_(torch.where(total > 0, moved / total * seen.fed(), 0))
