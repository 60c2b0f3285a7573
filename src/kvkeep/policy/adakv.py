"""A wrapper that divides the budget of a layer unevenly among its heads."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, final

import torch
from torch import Tensor

from kvkeep.errors import SpecError
from kvkeep.geometry import Geometry
from kvkeep.planes import POSITION, Planes, PlaneSpec
from kvkeep.policy.base import Arrivals, Observation, Policy
from kvkeep.policy.protection import Protection
from kvkeep.policy.ranking import lowest
from kvkeep.policy.rule import Rule, rule_of
from kvkeep.policy.scored import Scored
from kvkeep.policy.share import Share


@final
@dataclass(frozen=True)
class AdaKV(Policy):
    """Compares the scores of `inner` over all heads of a layer: one head may keep more than the
    budget if others keep less, but each keeps at least the share `floor` of it. Heads have lengths
    of their own, so the memory of heads with few slots is freed. Source: AdaKV (arXiv 2407.11550).
    """

    inner: Policy
    floor: float = 0.2

    name: ClassVar[str] = "adakv"
    wraps: ClassVar[bool] = True
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
        # Policies declare these as class variables; a wrapper has those of the inner policy.
        object.__setattr__(self, "needs", self.inner.needs)
        object.__setattr__(self, "rollback", self.inner.rollback)
        object.__setattr__(self, "weighs_values", self.inner.weighs_values)

    @property
    def scored(self) -> Scored:
        """The inner policy."""
        assert isinstance(self.inner, Scored)
        return self.inner

    @property
    def planes(self) -> dict[str, PlaneSpec]:
        return self.inner.planes

    @property
    def budget(self) -> int | None:
        return self.inner.budget

    @property
    def share(self) -> Share | None:
        return self.inner.share

    def at(self, fed: int) -> Policy:
        inner = self.inner.at(fed)
        return self if inner is self.inner else replace(self, inner=inner)

    def budget_at(self, fed: int) -> int | None:
        return self.inner.budget_at(fed)

    @property
    def rule(self) -> Rule | None:
        inner = rule_of(self.inner)
        return None if inner is None else inner._replace(floor=self.floor)

    @property
    def protection(self) -> Protection:
        return self.inner.protection

    @property
    def protected(self) -> int:
        return self.inner.protected

    @property
    def room(self) -> int:
        return self.inner.room

    @property
    def observed(self) -> int | None:
        return self.inner.observed

    @property
    def observes(self) -> bool:
        return self.inner.observes

    def within(self, window: int) -> Policy:
        inner = self.inner.within(window)
        return replace(self, inner=inner) if isinstance(inner, Scored) else inner

    def with_budget(self, tokens: int | Share) -> Policy:
        return replace(self, inner=self.inner.with_budget(tokens))

    @property
    def step(self) -> int | None:
        return self.inner.step

    def keeping(self, stop: int) -> Policy:
        return replace(self, inner=self.inner.keeping(stop))

    def enter(self, tokens: Arrivals) -> Planes:
        return self.inner.enter(tokens)

    def observe(self, planes: Planes, seen: Observation) -> None:
        self.inner.observe(planes, seen)

    def why_not_memory(self, memory: Planes, geometry: Geometry) -> str:
        return self.inner.why_not_memory(memory, geometry)

    def victims(self, count: int, planes: Planes, seen: Observation) -> Tensor:
        budget = self.budget
        assert budget is not None  # of `at`
        position = planes[POSITION]
        worth = self.scored.worth(planes, seen)
        rows, heads, slots = worth.shape
        safe = min(slots, int(self.floor * budget))
        best = lowest(worth, position, slots)[..., slots - safe :]
        guarded = worth.scatter(2, best, torch.inf).masked_fill(worth == -torch.inf, -torch.inf)
        # The padding of a head up to the longest one consists of empty slots, which go first.
        many = heads * (slots - budget)
        order = lowest(guarded.flatten(1), position.flatten(1), many)
        dropped = torch.zeros(rows, heads * slots, dtype=torch.bool, device=worth.device)
        return dropped.scatter_(1, order, True).view(rows, heads, slots)
