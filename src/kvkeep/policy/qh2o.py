"""H2O, corrected for the error of encoding each token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvkeep.errors import SpecError
from kvkeep.planes import POSITION, Planes, PlaneSpec
from kvkeep.policy.base import Arrivals, Need, Observation
from kvkeep.policy.h2o import H2O
from kvkeep.policy.rule import Enter, Learn, Rule
from kvkeep.policy.scored import SCORE

ERROR = "error"


@dataclass(frozen=True)
class QH2O(H2O):
    """Score: mix * (score of H2O) - (1 - mix) * (encoding error |k - k'| + |v - v'|), with score
    and error scaled to 0..1 over a head's slots. Source: Q-Hitter (MLSys 2024), as in keys_values.
    """

    mix: float = 0.5

    name: ClassVar[str] = "qh2o"
    needs: ClassVar[frozenset[Need]] = frozenset({Need.MASS, Need.ENCODE_ERROR})

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 <= self.mix <= 1.0:
            raise SpecError(
                f"{self.name} mix {self.mix}: give 0 (error only) to 1 (attention only)"
            )

    @property
    def planes(self) -> dict[str, PlaneSpec]:
        return super().planes | {ERROR: PlaneSpec((), torch.float32)}

    @property
    def rule(self) -> Rule | None:
        enter = {SCORE: Enter.ZERO, ERROR: Enter.ERROR}
        return Rule(enter, Learn.SUM, by_query=self.normalize, mix=self.mix)

    def enter(self, tokens: Arrivals) -> Planes:
        assert tokens.error is not None
        return {**super().enter(tokens), ERROR: tokens.error}

    def score(self, planes: Planes, seen: Observation) -> Tensor:
        live = planes[POSITION] >= 0
        worth, error = (_unit(x, live) for x in (super().score(planes, seen), planes[ERROR]))
        return self.mix * worth - (1 - self.mix) * error


def _unit(x: Tensor, live: Tensor) -> Tensor:
    """x scaled so that the live slots of a head span 0..1; 0 if all are equal. NaN stays NaN and
    does not affect the scaling."""
    counted = live & ~x.isnan()
    low = x.masked_fill(~counted, torch.inf).amin(dim=-1, keepdim=True)
    span = x.masked_fill(~counted, -torch.inf).amax(dim=-1, keepdim=True) - low
    return torch.where(span > 0, (x - low) / span, x * 0)
