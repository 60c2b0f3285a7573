"""A wrapper that gives lower layers more of the budget."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from kvkeep.errors import SpecError
from kvkeep.policy.base import Policy
from kvkeep.policy.wrapper import Wrapper


@final
@dataclass(frozen=True)
class Pyramid(Wrapper):
    """Uses `inner` with a budget that falls linearly from the first layer to the last; its mean
    over layers stays the same. The last layer's budget is 1 / `beta` of the mean, not counting
    slots that `inner` protects. Source: PyramidKV (arXiv 2406.02069).
    """

    beta: float = 20.0

    name: ClassVar[str] = "pyramid"

    def __post_init__(self) -> None:
        if not self.inner.evicts or isinstance(self.inner, Pyramid):
            raise SpecError(
                f"pyramid({self.inner.name}): {self.inner.name} has no budget to divide "
                "among layers; use pyramid(h2o:1024)"
            )
        if not self.beta >= 1.0:
            raise SpecError(
                f"pyramid beta {self.beta}: it must be at least 1 (equal budgets); use 20"
            )

    def in_layer(self, index: int, count: int) -> Policy:
        at = 0.5 if count == 1 else index / (count - 1)
        last = 1 / self.beta
        factor = 2 - last + at * 2 * (last - 1)
        inner, budget = self.inner, self.inner.budget
        if inner.share is not None:
            return inner.with_budget(inner.share.times(factor))
        assert budget is not None  # `inner` evicts
        protected = inner.protection.slots
        tokens = protected + round((budget - protected) * factor)
        return inner.with_budget(max(protected + 1, tokens))
