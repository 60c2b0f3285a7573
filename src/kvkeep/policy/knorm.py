"""Keep the keys with the smallest norms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from kvkeep.planes import Planes, norms
from kvkeep.policy.base import Arrivals
from kvkeep.policy.rule import Enter, Rule
from kvkeep.policy.scored import SCORE, Scored


@final
@dataclass(frozen=True)
class KNorm(Scored):
    """Score: -|k|. A key with a small norm tends to receive much attention. Source: L2 norm
    compression (arXiv 2406.11430).
    """

    name: ClassVar[str] = "knorm"
    newest: ClassVar[int] = 64
    rollback: ClassVar[bool] = True

    @property
    def rule(self) -> Rule | None:
        return Rule({SCORE: Enter.KEY_NORM})

    def enter(self, tokens: Arrivals) -> Planes:
        return {SCORE: -norms(tokens.keys)}
