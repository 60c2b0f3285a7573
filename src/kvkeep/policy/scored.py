"""The base of policies that score each slot and keep the highest scores and protected slots."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from kvkeep.errors import SpecError
from kvkeep.planes import Planes, PlaneSpec
from kvkeep.policy.base import Observation, Policy
from kvkeep.policy.protection import Protection
from kvkeep.policy.ranking import least_worthy
from kvkeep.policy.share import Share
from kvkeep.policy.window import Window
from kvkeep.renamed import Renamed

SCORE = "score"
"""The name of the plane with the scores, fp32 (B, H, S)."""


@dataclass(frozen=True)
class Scored(Policy):
    """Keeps `tokens` slots: protected slots, then the slots with the highest scores.

    A budget that is a share of the tokens fed grows with them; at least `least` slots are kept.
    The first `sinks` tokens, positions `keep_from` to `keep_to` (exclusive), and the newest
    `protected_recent` tokens are protected. Among equal scores the oldest token is evicted first.
    NaN is the lowest score.

    If `recent` is None, the `newest` tokens are protected, but at most half of the budget less
    sinks and kept positions.

    With `step`, a layer divides a chunk into steps of at most `step` tokens, so the chunk keeps the
    same slots as if it were fed in pieces of that size.
    """

    tokens: int | Share
    recent: int | None = None
    sinks: int = 0
    keep_from: int = 0
    keep_to: int = 0
    least: int = 64
    step: int | None = None

    per_head: ClassVar[bool] = True
    newest: ClassVar[int] = 0
    """The number of newest tokens protected by default."""

    worth = Renamed("score")

    def __post_init__(self) -> None:
        if isinstance(self.tokens, Share):
            if self.least < 1:
                raise SpecError(
                    f"{self.name} least {self.least}: a share keeps at least 1 slot; use least=64"
                )
            self.at(0)  # checks the other fields
            return
        values = (self.sinks, self.keep_from, self.keep_to - self.keep_from, self.protected_recent)
        if min(values) < 0 or not 1 <= self.tokens < 2**31 or self.keep_to >= 2**31:
            raise SpecError(
                f"{self.name} of {self.tokens} tokens, {self.protected_recent} recent, "
                f"{self.sinks} sinks and positions {self.keep_from} to {self.keep_to}: tokens must "
                "be at least 1 and below 2**31, recent and sinks at least 0, keep_from at most "
                f"keep_to; write {self.name}:1024"
            )
        if self.step is not None and self.step < 1:
            raise SpecError(
                f"{self.name} step {self.step}: a step takes at least 1 token; use step=1, or "
                "leave out step, so that each chunk is one step"
            )
        protected = self.protection.slots
        if protected > self.tokens:
            raise SpecError(
                f"{self.name} keeps {self.tokens} tokens, but protects {protected} (the "
                f"newest {self.protected_recent}, sinks and kept positions); use "
                f"{self.name}:{protected} or more (least={protected} if the budget is a share), or "
                "protect fewer tokens"
            )

    @property
    def protected_recent(self) -> int:
        """Number of newest tokens that are never evicted."""
        if self.recent is None:
            fixed = Protection(0, self.sinks, self.keep_from, self.keep_to).fixed
            return max(0, min(self.newest, ((self.budget or 0) - fixed) // 2))
        return self.recent

    @property
    def protection(self) -> Protection:
        return Protection(self.protected_recent, self.sinks, self.keep_from, self.keep_to)

    @property
    def planes(self) -> dict[str, PlaneSpec]:
        return {SCORE: PlaneSpec((), torch.float32, shared=not self.per_head)}

    @property
    def budget(self) -> int | None:
        return None if isinstance(self.tokens, Share) else self.tokens

    @property
    def share(self) -> Share | None:
        return self.tokens if isinstance(self.tokens, Share) else None

    def at(self, fed: int) -> Policy:
        if not isinstance(self.tokens, Share):
            return self
        return replace(self, tokens=self.tokens.budget(fed, self.least))

    def within(self, window: int) -> Policy:
        fits = not isinstance(self.tokens, Share) and self.tokens < window
        return self if fits else Window(window)

    def with_budget(self, tokens: int | Share) -> Policy:
        return replace(self, tokens=tokens)

    def keeping(self, stop: int) -> Policy:
        # Early in a text, a budget that is a share may be smaller than the protected positions, so
        # raise its minimum; by twice their number, because half may be for the newest tokens.
        least = self.least if self.share is None else self.least + 2 * stop
        to = self.protection.until(stop)
        return replace(self, keep_from=0, keep_to=to, least=least)

    def score(self, planes: Planes, seen: Observation) -> Tensor:
        """The score of each slot, floating point (B, H, S), or (B, 1, S) unless `per_head`; by
        default the plane `score`."""
        return planes[SCORE]

    def victims(self, count: int, planes: Planes, seen: Observation) -> Tensor:
        return least_worthy(self.score(planes, seen), planes, seen, self.protection, count)
