"""Keep the tokens that the last queries of a prompt, the observation window, attend to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d

from kvkeep.errors import SpecError
from kvkeep.planes import POSITION, Planes
from kvkeep.policy.base import Need, Observation
from kvkeep.policy.rule import Enter, Learn, Rule
from kvkeep.policy.scored import SCORE, Scored


@final
@dataclass(frozen=True)
class SnapKV(Scored):
    """Score: the mean attention of the last `window` queries; for tokens before the window, also
    averaged over `pool` neighbouring tokens. The window itself is protected.

    A chunk shorter than the window, such as a single token, updates the mean with the weight
    length / `window`. Source: SnapKV (arXiv 2404.14469), which scores the prompt only.
    """

    window: int = 64
    pool: int = 5

    name: ClassVar[str] = "snapkv"
    needs: ClassVar[frozenset[Need]] = frozenset({Need.MASS})

    def __post_init__(self) -> None:
        if self.window < 1 or self.pool < 1 or not self.pool % 2:
            raise SpecError(
                f"snapkv window {self.window}, pool {self.pool}: window must be at least 1, pool "
                "an odd number; use window=64,pool=5"
            )
        super().__post_init__()

    @property
    def protected_recent(self) -> int:
        return max(self.recent or 0, self.window)

    @property
    def observed(self) -> int:
        return self.window

    @property
    def rule(self) -> Rule | None:
        return Rule({SCORE: Enter.ZERO}, Learn.FADE, 1 / self.window) if self.window > 1 else None

    def observe(self, planes: Planes, seen: Observation) -> None:
        assert seen.mass is not None
        mass, fed = seen.mass, seen.fed()
        if isinstance(fed, int):
            fed = min(fed, self.window)
            if fed == self.window:
                mass = self._pooled(mass, planes[POSITION], seen.newest)
        else:
            fed = fed.clamp(max=self.window)
            assert seen.position is not None
            if seen.position.shape[-1] >= self.window:
                pooled = self._pooled(mass, planes[POSITION], seen.newest)
                mass = torch.where(fed == self.window, pooled, mass)
        planes[SCORE].mul_(1 - fed / self.window).add_(mass, alpha=1 / self.window)

    def _pooled(self, mass: Tensor, position: Tensor, newest: int | Tensor) -> Tensor:
        """Mass (B, H, S), averaged over neighbours by position. Slots in the window are unchanged
        and do not count in the averages."""
        order = position.argsort(dim=-1, stable=True)
        before = (position <= newest - self.window) & (position >= 0)
        counted = (mass * before).gather(-1, order)
        pooled = avg_pool1d(counted, self.pool, stride=1, padding=self.pool // 2)
        return torch.where(before, torch.empty_like(mass).scatter_(-1, order, pooled), mass)
