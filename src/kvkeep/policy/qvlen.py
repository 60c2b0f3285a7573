"""VLen, corrected for the error of encoding each token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from kvkeep.policy.qh2o import ERROR, QH2O
from kvkeep.policy.rule import Enter, Learn, Rule
from kvkeep.policy.scored import SCORE
from kvkeep.policy.vlen import NORM, VLen


@final
@dataclass(frozen=True)
class QVLen(QH2O, VLen):
    """Score: that of `QH2O` with the score of `VLen` instead of H2O's. Source: keys_values'
    QuantizedVLengthH2O.
    """

    name: ClassVar[str] = "qvlen"

    @property
    def rule(self) -> Rule | None:
        enter = {SCORE: Enter.ZERO, ERROR: Enter.ERROR, NORM: Enter.VALUE_NORM}
        return Rule(enter, Learn.WEIGHTED, by_query=self.normalize, mix=self.mix)
