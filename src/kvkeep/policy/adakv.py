"""A wrapper that divides the budget of a layer unevenly among its heads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from kvkeep.errors import SpecError
from kvkeep.planes import POSITION, Planes
from kvkeep.policy.base import Observation, Policy
from kvkeep.policy.ranking import lowest, worth
from kvkeep.policy.rule import Rule
from kvkeep.policy.scored import Scored
from kvkeep.policy.wrapper import Wrapper


@final
@dataclass(frozen=True)
class AdaKV(Wrapper):
    """Compares the scores of `inner` over all heads of a layer: a head may keep more than the
    budget if other heads keep less; each head keeps at least the share `floor` of the budget. Heads
    differ in length, and the memory of freed slots is returned. Source: AdaKV (arXiv 2407.11550).
    """

    inner: Scored
    floor: float = 0.2

    name: ClassVar[str] = "adakv"
    ragged: ClassVar[bool] = True
    per_head: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not isinstance(self.inner, Scored) or not self.inner.per_head:
            raise SpecError(
                f"adakv({self.inner.name}): {self.inner.name} has no scores per head to "
                "compare; use adakv(h2o:1024)"
            )
        if not 0.0 <= self.floor <= 1.0:
            raise SpecError(
                f"adakv floor {self.floor}: it must be from 0 to 1; use adakv:0.2(h2o:1024)"
            )

    @property
    def rule(self) -> Rule | None:
        inner = super().rule
        return None if inner is None else inner._replace(floor=self.floor)

    def within(self, window: int) -> Policy:
        inner = self.inner.within(window)
        return self.around(inner) if isinstance(inner, Scored) else inner

    def victims(self, count: int, planes: Planes, seen: Observation) -> Tensor:
        budget = self.budget
        assert budget is not None  # `at` has made it a number
        inner, position = self.inner, planes[POSITION]
        ranks = worth(inner.score(planes, seen), planes, seen, inner.protection)
        rows, heads, slots = ranks.shape
        safe = min(slots, max(0, int(self.floor * budget) - seen.plain))
        best = lowest(ranks, position, slots)[..., slots - safe :]
        guarded = ranks.scatter(2, best, torch.inf).masked_fill(ranks == -torch.inf, -torch.inf)
        # Heads shorter than the longest are padded with empty slots, which are victims first.
        many = heads * (slots - (budget - seen.plain))
        order = lowest(guarded.flatten(1), position.flatten(1), many)
        dropped = torch.zeros(rows, heads * slots, dtype=torch.bool, device=ranks.device)
        return dropped.scatter_(1, order, True).view(rows, heads, slots)
