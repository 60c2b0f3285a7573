"""Keep the newest tokens and the first few."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, final

from torch import Tensor

from kvkeep.errors import SpecError
from kvkeep.planes import Planes, Reach
from kvkeep.policy.base import Observation, Policy
from kvkeep.policy.ranking import Protection, least_worthy


@final
@dataclass(frozen=True)
class Window(Policy):
    """Each query sees the last `size` tokens, its own included, the first `sinks` tokens, and
    positions `keep_from` to `keep_to` (exclusive).

    The result does not depend on how the tokens are split into chunks. Sources: Mistral 7B
    (arXiv 2310.06825) for the window, StreamingLLM (arXiv 2309.17453) for the sinks.
    """

    size: int
    sinks: int = 0
    keep_from: int = 0
    keep_to: int = 0

    name: ClassVar[str] = "window"
    rollback: ClassVar[bool] = True

    def __post_init__(self) -> None:
        ordered = 0 <= self.keep_from <= self.keep_to < 2**31
        if not (self.size >= 1 and self.sinks >= 0 and ordered and self.budget < 2**31):
            raise SpecError(
                f"window of {self.size} tokens, {self.sinks} sinks and positions {self.keep_from} "
                f"to {self.keep_to}: size must be at least 1, sinks at least 0, positions in "
                "order, all together below 2**31; use window:1024,sinks=4"
            )

    @property
    def budget(self) -> int:
        return self.size + self.reach.fixed

    @property
    def reach(self) -> Reach:
        return Reach(self.size, self.sinks, self.keep_from, self.keep_to)

    @property
    def protected(self) -> int:
        return self.reach.fixed

    def with_budget(self, tokens: int) -> Policy:
        return replace(self, size=tokens - self.protected)

    def within(self, window: int) -> Policy:
        return self if self.size < window else Window(window)

    def victims(self, count: int, planes: Planes, seen: Observation) -> Tensor:
        return least_worthy(
            None, planes, seen, Protection(0, self.sinks, self.keep_from, self.keep_to), count
        )
