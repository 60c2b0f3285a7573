"""Keep the newest tokens and the first few."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, final

from torch import Tensor

from kvkeep.errors import SpecError
from kvkeep.planes import Planes, Reach
from kvkeep.policy.base import Observation, Policy
from kvkeep.policy.protection import Protection
from kvkeep.policy.ranking import least_worthy
from kvkeep.policy.rule import Rule
from kvkeep.policy.share import Share


@final
@dataclass(frozen=True)
class Window(Policy):
    """Each query sees the last `size` tokens, its own included, the first `sinks` tokens, and
    positions `keep_from` to `keep_to` (exclusive).

    The result does not depend on how the tokens are split into chunks, unless `size` is a share of
    the tokens fed: then each chunk evicts down to the share at that time, at least `least` tokens.
    Sources: Mistral 7B (arXiv 2310.06825) for the window, StreamingLLM (arXiv 2309.17453) for the
    sinks.
    """

    size: int | Share
    sinks: int = 0
    keep_from: int = 0
    keep_to: int = 0
    least: int = 64

    name: ClassVar[str] = "window"
    rollback: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if isinstance(self.size, Share):
            self.at(0)  # checks the other fields
            return
        ordered = 0 <= self.keep_from <= self.keep_to < 2**31
        least = min(self.size - 1, self.sinks)
        if not (least >= 0 and ordered and self.size + self.protection.slots < 2**31):
            raise SpecError(
                f"window of {self.size} tokens, {self.sinks} sinks and positions {self.keep_from} "
                f"to {self.keep_to}: size must be at least 1, sinks at least 0, positions in "
                "order, all together below 2**31; use window:1024,sinks=4"
            )

    @property
    def budget(self) -> int | None:
        return None if isinstance(self.size, Share) else self.size + self.protection.slots

    @property
    def share(self) -> Share | None:
        return self.size if isinstance(self.size, Share) else None

    def at(self, fed: int) -> Policy:
        if not isinstance(self.size, Share):
            return self
        return self.with_budget(self.size.budget(fed, self.least))

    @property
    def reach(self) -> Reach | None:
        if isinstance(self.size, Share):
            return None
        return Reach(self.size, self.sinks, self.keep_from, self.keep_to)

    @property
    def rule(self) -> Rule | None:
        return Rule()

    @property
    def protection(self) -> Protection:
        return Protection(0, self.sinks, self.keep_from, self.keep_to)

    def with_budget(self, tokens: int | Share) -> Policy:
        return replace(
            self, size=tokens if isinstance(tokens, Share) else tokens - self.protection.slots
        )

    def keeping(self, stop: int) -> Policy:
        to = self.protection.until(stop)
        added = Protection(0, self.sinks, 0, to).fixed - self.protection.slots
        if isinstance(self.size, Share):  # early in a text the share may not suffice for them
            return replace(self, keep_from=0, keep_to=to, least=self.least + added)
        return replace(self, size=self.size - added, keep_from=0, keep_to=to)

    def within(self, window: int) -> Policy:
        fits = not isinstance(self.size, Share) and self.size < window
        return self if fits else Window(window)

    def victims(self, count: int, planes: Planes, seen: Observation) -> Tensor:
        return least_worthy(None, planes, seen, self.protection, count)
