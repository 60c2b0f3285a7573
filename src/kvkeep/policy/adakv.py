"""Another policy, with more of the budget for heads that need it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, final

import torch
from torch import Tensor

from kvkeep.errors import SpecError
from kvkeep.geometry import Geometry
from kvkeep.planes import POSITION, Planes, PlaneSpec
from kvkeep.policy.base import Arrivals, Observation, Policy
from kvkeep.policy.ranking import lowest
from kvkeep.policy.scored import Scored


@final
@dataclass(frozen=True)
class AdaKV(Policy):
    """`inner`'s scores, compared over all heads of a layer at once: a head keeps more than the
    budget where others keep less, but at least `floor` of it. Heads have lengths of their own, so
    what one does not need is freed. Source: AdaKV (arXiv 2407.11550).
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
                f"adakv({self.inner.name}): {self.inner.name} has no scores of each head to "
                "compare; use adakv(h2o:1024)"
            )
        if not 0.0 <= self.floor <= 1.0:
            raise SpecError(f"adakv floor {self.floor}: a share of the budget, 0 to 1; use 0.2")
        # Declared by classes, but a wrapper's are those of what it wraps.
        object.__setattr__(self, "needs", self.inner.needs)
        object.__setattr__(self, "rollback", self.inner.rollback)

    @property
    def scored(self) -> Scored:
        """The inner policy."""
        assert isinstance(self.inner, Scored)
        return self.inner

    @property
    def planes(self) -> dict[str, PlaneSpec]:
        return self.inner.planes

    @property
    def budget(self) -> int:
        return self.scored.budget

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

    def with_budget(self, tokens: int) -> Policy:
        return replace(self, inner=self.inner.with_budget(tokens))

    def enter(self, tokens: Arrivals) -> Planes:
        return self.inner.enter(tokens)

    def observe(self, planes: Planes, seen: Observation) -> None:
        self.inner.observe(planes, seen)

    def why_not_memory(self, memory: Planes, geometry: Geometry) -> str:
        return self.inner.why_not_memory(memory, geometry)

    def victims(self, count: int, planes: Planes, seen: Observation) -> Tensor:
        position = planes[POSITION]
        worth = self.scored.worth(planes, seen)
        rows, heads, slots = worth.shape
        safe = min(slots, int(self.floor * self.budget))
        best = lowest(worth, position, slots)[..., slots - safe :]
        guarded = worth.scatter(2, best, torch.inf).masked_fill(worth == -torch.inf, -torch.inf)
        # A head's filling up to the longest one counts as empty slots do: they go first.
        many = heads * (slots - self.budget)
        order = lowest(guarded.flatten(1), position.flatten(1), many)
        dropped = torch.zeros(rows, heads * slots, dtype=torch.bool, device=worth.device)
        return dropped.scatter_(1, order, True).view(rows, heads, slots)
