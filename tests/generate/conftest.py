"""The model that the tests of generation share."""

from __future__ import annotations

import pytest
import torch
from support.tiny_models import tiny

import kvkeep


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    model = tiny("llama")
    kvkeep.attach(model)
    return model
