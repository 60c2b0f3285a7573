"""VLen, corrected for the error of encoding each token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from kvkeep.policy.qh2o import QH2O
from kvkeep.policy.vlen import VLen


@final
@dataclass(frozen=True)
class QVLen(QH2O, VLen):
    """Score: that of `QH2O`, with the score of `VLen` in place of H2O's. Source: keys_values'
    QuantizedVLengthH2O.
    """

    name: ClassVar[str] = "qvlen"
