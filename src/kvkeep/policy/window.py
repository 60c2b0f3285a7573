"""Keep the most recent tokens, and the first few."""

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
    """Each query sees the last `size` tokens, its own included, and the first `sinks` tokens.

    The result does not depend on how the tokens were split into chunks. Sources: Mistral 7B
    (arXiv 2310.06825) for the window, StreamingLLM (arXiv 2309.17453) for the sinks.
    """

    size: int
    sinks: int = 0

    name: ClassVar[str] = "window"
    rollback: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not (self.size >= 1 and self.sinks >= 0 and self.budget < 2**31):
            raise SpecError(
                f"window of {self.size} tokens and {self.sinks} sinks: size must be at least 1, "
                "sinks at least 0, both together below 2**31; use window:1024,sinks=4"
            )

    @property
    def budget(self) -> int:
        return self.size + self.sinks

    @property
    def reach(self) -> Reach:
        return Reach(self.size, self.sinks)

    @property
    def protected(self) -> int:
        return self.sinks

    def with_budget(self, tokens: int) -> Policy:
        return replace(self, size=tokens - self.sinks)

    def within(self, window: int) -> Policy:
        return self if self.size < window else Window(window)

    def victims(self, count: int, planes: Planes, seen: Observation) -> Tensor:
        return least_worthy(None, planes, seen, Protection(sinks=self.sinks), count)
