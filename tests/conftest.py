"""Fixtures for all tests."""

from __future__ import annotations

from typing import Any

import pytest
import torch


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def smollm2() -> tuple[Any, Any]:
    """SmolLM2-135M-Instruct in float32, and its tokenizer; leave it detached."""
    from kvkeep.hf.models import load

    return load("smollm2-135m", "float32", "cpu")
