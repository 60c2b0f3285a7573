"""The base of policies that modify another policy."""

from __future__ import annotations

from dataclasses import dataclass, replace
from operator import attrgetter
from typing import ClassVar

from torch import Tensor

from kvkeep.geometry import Geometry
from kvkeep.planes import Planes
from kvkeep.policy.base import Arrivals, Observation, Policy, rule_of
from kvkeep.policy.rule import Rule
from kvkeep.policy.share import Share


@dataclass(frozen=True)
class Wrapper(Policy):
    """Behaves like `inner`, except for the members that a subclass overrides. In a spec, its name
    and options precede the inner policy: `name:options(inner)`."""

    inner: Policy

    wraps: ClassVar[bool] = True

    def around(self, inner: Policy) -> Policy:
        """This policy with another inner policy."""
        return self if inner is self.inner else replace(self, inner=inner)

    def reading(self, file: str) -> Policy:
        return self.around(self.inner.reading(file))

    def at(self, fed: int) -> Policy:
        return self.around(self.inner.at(fed))

    def within(self, window: int) -> Policy:
        return self.around(self.inner.within(window))

    def in_layer(self, index: int, count: int) -> Policy:
        return self.around(self.inner.in_layer(index, count))

    def with_budget(self, tokens: int | Share) -> Policy:
        return self.around(self.inner.with_budget(tokens))

    def keeping(self, stop: int) -> Policy:
        return self.around(self.inner.keeping(stop))

    @property
    def rule(self) -> Rule | None:
        return rule_of(self.inner)

    def enter(self, tokens: Arrivals) -> Planes:
        return self.inner.enter(tokens)

    def observe(self, planes: Planes, seen: Observation) -> None:
        self.inner.observe(planes, seen)

    def why_not_memory(self, memory: Planes, geometry: Geometry) -> str:
        return self.inner.why_not_memory(memory, geometry)

    def victims(self, count: int, planes: Planes, seen: Observation) -> Tensor:
        return self.inner.victims(count, planes, seen)


FORWARDED = (
    *("needs", "rollback", "per_head", "ragged", "planes", "budget", "share", "protection"),
    *("reach", "step", "shows_padding", "observed", "observes"),
    *("compression", "calibrated_for", "file"),
)
"""Members of `Policy` that return the inner policy's value."""

for _name in FORWARDED:
    setattr(Wrapper, _name, property(attrgetter(f"inner.{_name}")))
