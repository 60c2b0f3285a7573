"""Fixtures for the tests of blocks."""

from __future__ import annotations

import pytest
from transformers import AutoTokenizer

from kvkeep.hf.models import resolve


@pytest.fixture(scope="session")
def tokenizer():
    return AutoTokenizer.from_pretrained(resolve("smollm2-135m"))
