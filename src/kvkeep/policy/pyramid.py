"""Another policy, with more of the budget in the lower layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from torch import Tensor

from kvkeep.errors import SpecError
from kvkeep.geometry import Geometry
from kvkeep.planes import Planes
from kvkeep.policy.base import Observation, Policy


@final
@dataclass(frozen=True)
class Pyramid(Policy):
    """`inner`, whose budget falls from the first layer to the last by equal steps; the layers
    together keep what they would have kept. The last layer's is 1 / `beta` of the average, what
    `inner` protects not counted. Source: PyramidKV (arXiv 2406.02069).
    """

    inner: Policy
    beta: float = 20.0

    name: ClassVar[str] = "pyramid"
    wraps: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.inner.budget is None or isinstance(self.inner, Pyramid):
            raise SpecError(
                f"pyramid({self.inner.name}): {self.inner.name} has no budget of its own to share "
                "out among layers; use pyramid(h2o:1024)"
            )
        # Declared by classes, but a wrapper's are those of what it wraps.
        object.__setattr__(self, "needs", self.inner.needs)
        object.__setattr__(self, "rollback", self.inner.rollback)
        if not self.beta >= 1.0:
            raise SpecError(f"pyramid beta {self.beta}: at least 1 (all layers alike); use 20")

    @property
    def budget(self) -> int | None:
        return self.inner.budget

    def in_layer(self, index: int, count: int) -> Policy:
        assert self.inner.budget is not None
        shared = self.inner.budget - self.inner.protected
        last = shared / self.beta
        at = 0.5 if count == 1 else index / (count - 1)
        tokens = self.inner.protected + round(2 * shared - last + at * 2 * (last - shared))
        return self.inner.with_budget(max(self.inner.protected + 1, tokens))

    def why_not_memory(self, memory: Planes, geometry: Geometry) -> str:
        return self.inner.why_not_memory(memory, geometry)

    def victims(self, count: int, planes: Planes, seen: Observation) -> Tensor:
        raise AssertionError("a layer asks the policy that in_layer() gives it")
