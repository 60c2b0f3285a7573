"""Keep every token: the exact cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from kvkeep.policy.base import Policy
from kvkeep.policy.rule import Rule
from kvkeep.policy.window import Window


@final
@dataclass(frozen=True)
class KeepAll(Policy):
    """Evicts nothing. On a layer with a sliding window, it keeps the slots in the window."""

    name: ClassVar[str] = "keep_all"
    rollback: ClassVar[bool] = True

    def within(self, window: int) -> Policy:
        return Window(window)

    def keeping(self, stop: int) -> Policy:
        return self

    @property
    def rule(self) -> Rule | None:
        return Rule()
