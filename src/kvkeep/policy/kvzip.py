"""Keep the tokens that a model needs to repeat its own text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from kvkeep.errors import SpecError
from kvkeep.policy.base import Policy
from kvkeep.policy.compression import Compression
from kvkeep.policy.rule import Rule
from kvkeep.policy.share import Share
from kvkeep.policy.window import Window


@final
@dataclass(frozen=True)
class KVzip(Policy):
    """Keeps every token until `compress` evicts all but a share of the slots.

    A slot's score is the largest attention weight that it receives while the model reads the text a
    second time, in parts of at most `chunk` tokens. Each part attends to the first `sinks` tokens,
    to the slots of the same part, and to itself. Scores are compared over all layers and heads;
    with `uniform`, all heads keep the same number of slots. The first `sinks` and the newest
    `recent` tokens (at most half of the share) are always kept. Source: KVzip (arXiv 2505.23416),
    where the second reading attends to the whole text, and only its weights are computed over the
    part.
    """

    tokens: Share
    sinks: int = 4
    chunk: int = 512
    recent: int = 128
    uniform: bool = False

    name: ClassVar[str] = "kvzip"
    rollback: ClassVar[bool] = True
    per_head: ClassVar[bool] = True
    ragged: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.sinks < 1 or self.chunk < 1 or self.recent < 0:
            raise SpecError(
                f"kvzip sinks {self.sinks}, chunk {self.chunk}, recent {self.recent}: sinks and "
                "chunk must be at least 1, recent at least 0; use sinks=4,chunk=512,recent=128"
            )

    @property
    def rule(self) -> Rule | None:
        return Rule()

    @property
    def compression(self) -> Compression:
        return Compression(self.tokens, self.sinks, self.chunk, self.recent, self.uniform)

    def within(self, window: int) -> Policy:
        return Window(window)
