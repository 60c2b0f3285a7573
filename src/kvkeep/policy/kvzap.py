"""Keep the tokens that later tokens will need, as a scorer trained for the model predicts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, final

from kvkeep.errors import SpecError
from kvkeep.planes import Planes
from kvkeep.policy.adakv import AdaKV
from kvkeep.policy.base import Arrivals, Need, Policy
from kvkeep.policy.rule import Enter, Rule
from kvkeep.policy.scored import SCORE, Scored
from kvkeep.policy.scorer import LayerScorer, Scorer
from kvkeep.policy.share import Share
from kvkeep.policy.window import Window

_MARKS = ",:;+@"
"""Separators of the parts of a spec."""


@final
@dataclass(frozen=True)
class KVzap(Policy):
    """Keeps a share of the slots of all layers. A scorer predicts the scores of `kvzip` from each
    token's key and value when they are written. So a prompt is compressed while it is read, and an
    answer while it is generated.

    `kvkeep calibrate` writes the scorer to a file, for one model. The file also divides the share
    among layers; the heads of a layer compete. The first `sinks` and the newest `recent` tokens are
    always kept.

    Source: KVzap (arXiv 2601.07891), whose scorers take the layer's input instead of keys and
    values.
    """

    tokens: Share
    scorer: str
    recent: int = 128
    sinks: int = 4

    name: ClassVar[str] = "kvzap"
    needs: ClassVar[frozenset[Need]] = frozenset({Need.ROTARY})
    per_head: ClassVar[bool] = True
    ragged: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.recent < 0 or self.sinks < 0 or self.recent + self.sinks < 1:
            raise SpecError(
                f"kvzap recent {self.recent}, sinks {self.sinks}: at least 0, and together at "
                "least 1; use recent=128,sinks=4"
            )
        if set(self.scorer) & set(_MARKS):
            raise SpecError(
                f"scorer {self.scorer!r}: in a spec, a path cannot contain any of {_MARKS}; rename "
                "the file"
            )

    @property
    def share(self) -> Share:
        return self.tokens

    @property
    def calibrated_for(self) -> str | None:
        return Scorer.read(self.scorer).model

    @property
    def file(self) -> str:
        return self.scorer

    def reading(self, file: str) -> Policy:
        return replace(self, scorer=file)

    def at(self, fed: int) -> Policy:
        raise SpecError(
            f"scorer {self.scorer!r} has no scores for a layer without a sliding window; make one "
            "for this model with kvkeep calibrate"
        )

    def within(self, window: int) -> Policy:
        return Window(window)

    def in_layer(self, index: int, count: int) -> Policy:
        scorer = Scorer.read(self.scorer)
        if count != scorer.count:
            raise SpecError(
                f"scorer {self.scorer!r} is for a model of {scorer.count} layers, not {count}; "
                "make one for this model with kvkeep calibrate"
            )
        if index not in scorer.layers:  # a layer with a sliding window
            return self
        layer = scorer.layers[index]
        protected = self.recent + self.sinks
        share = max(layer.share_at(self.tokens), 1e-6)
        own = Predicted(Share(share), self.recent, self.sinks, least=protected, scorer=layer)
        return AdaKV(own, floor=0.0)


@final
@dataclass(frozen=True)
class Predicted(Scored):
    """Score: the prediction of `scorer` when a token is written."""

    scorer: LayerScorer | None = None

    name: ClassVar[str] = "kvzap"
    needs: ClassVar[frozenset[Need]] = frozenset({Need.ROTARY})

    @property
    def rule(self) -> Rule | None:
        return Rule({SCORE: Enter.GIVEN})

    def enter(self, tokens: Arrivals) -> Planes:
        assert self.scorer is not None
        score = self.scorer.predict(tokens.keys, tokens.values, tokens.position, tokens.rotary)
        return {SCORE: score}
