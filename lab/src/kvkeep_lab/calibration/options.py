"""Options of a calibration and of its command."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvkeep.errors import KVKeepError
from kvkeep.options import option, require_allowed
from kvkeep_lab.options import text_file


class CalibrationError(KVKeepError):
    """Options of a calibration are out of range, or its files cannot be written."""


@dataclass(frozen=True)
class CalibrationOptions:
    """The texts and the networks of a calibration.

    Args:
        text_file: UTF-8 text to read; None: sources and docstrings of Python's standard library.
        count: texts, at least 2.
        length: tokens of each text; at most half of the model's context.
        hidden: units of each network.
        steps: of training, for each layer.

    Raises:
        CalibrationError: a number is out of range.
    """

    text_file: Path | None = text_file("Calibrate with this UTF-8 text.")
    count: int = option(24, "Excerpts to read.", name="--texts", min=2)
    length: int = option(4096, "Tokens of each excerpt.", min=64)
    hidden: int = option(32, "Units of each head's network.", min=1)
    steps: int = option(600, "Training steps for each layer.", min=1)

    def __post_init__(self) -> None:
        require_allowed(self, CalibrationError)
