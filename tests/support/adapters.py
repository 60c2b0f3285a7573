"""Adapters that transformers itself loads into a model."""

from __future__ import annotations

import peft
import pytest
from packaging.version import Version
from transformers.integrations.peft import MIN_PEFT_VERSION


def needs_peft_of_transformers() -> pytest.MarkDecorator:
    """Skips tests where transformers refuses the version of PEFT, as 5.24 does those that the index
    has."""
    return pytest.mark.skipif(
        Version(peft.__version__) < Version(MIN_PEFT_VERSION),
        reason=f"transformers takes adapters of PEFT {MIN_PEFT_VERSION} and newer only",
    )
