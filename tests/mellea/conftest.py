"""A tiny model with SmolLM2's tokenizer, and a backend over it."""

from __future__ import annotations

from pathlib import Path

import llguidance.hf
import pytest
from support.lighthouse import OPTIONS
from support.tiny_models import tiny
from transformers import AutoTokenizer

from kvkeep.hf.cache_argument import OF_GENERATE
from kvkeep.hf.models import resolve
from kvkeep.mellea import KVKeepBackend


def pytest_collection_modifyitems(items):
    if OF_GENERATE == "cache":
        for item in items:
            if item.path.parent == Path(__file__).parent and item.path.name != "test_versions.py":
                item.add_marker(pytest.mark.skip(reason="Mellea 0.8 needs transformers below 5.24"))


@pytest.fixture(scope="session")
def tokenizer():
    return AutoTokenizer.from_pretrained(resolve("smollm2-135m"))


@pytest.fixture(scope="session", autouse=True)
def _once_for_each_tokenizer():
    """Every backend makes the vocabulary of grammars, which takes half a second."""
    make, made = llguidance.hf.from_tokenizer, {}

    def found(tokenizer, *args, **options):
        key = (id(tokenizer), args, tuple(options.items()))
        if key not in made:
            made[key] = tokenizer, make(tokenizer, *args, **options)
        return made[key][1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llguidance.hf, "from_tokenizer", found)
        yield


@pytest.fixture(scope="session")
def model():
    """Leave it detached."""
    return tiny("llama", vocab_size=49152, max_position_embeddings=1024).eval()


@pytest.fixture
def backend(model, tokenizer):
    with KVKeepBackend(model, tokenizer, model_options=OPTIONS) as backend:
        yield backend
