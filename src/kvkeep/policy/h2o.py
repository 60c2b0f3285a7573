"""Keep the heavy hitters: the tokens that have received the most attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvkeep.planes import POSITION, Planes
from kvkeep.policy.base import Need, Observation
from kvkeep.policy.rule import Enter, Learn, Rule
from kvkeep.policy.scored import SCORE, Scored


@dataclass(frozen=True)
class H2O(Scored):
    """Score: the mass a slot has received since it was written, per head; with `normalize` divided
    by the number of queries that saw it. Half of the budget is for the newest tokens, unless
    `recent` is given. Source: H2O (arXiv 2306.14048); the normalised form is from keys_values.
    """

    normalize: bool = False

    name: ClassVar[str] = "h2o"
    needs: ClassVar[frozenset[Need]] = frozenset({Need.MASS})

    @property
    def protected_recent(self) -> int:
        return (self.budget or 0) // 2 if self.recent is None else self.recent

    @property
    def rule(self) -> Rule | None:
        return Rule({SCORE: Enter.ZERO}, Learn.SUM, by_query=self.normalize)

    def observe(self, planes: Planes, seen: Observation) -> None:
        assert seen.mass is not None
        planes[SCORE].add_(seen.mass)

    def score(self, planes: Planes, seen: Observation) -> Tensor:
        if not self.normalize:
            return planes[SCORE]
        queries = seen.newest + 1 - planes[POSITION]
        return planes[SCORE] / queries
