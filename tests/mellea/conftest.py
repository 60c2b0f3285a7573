"""A tiny model with SmolLM2's tokenizer, and a backend over it."""

from __future__ import annotations

import pytest
from support.tiny_models import tiny
from transformers import AutoTokenizer

from kvkeep.hf.cache_argument import OF_GENERATE
from kvkeep.hf.models import resolve

# Mellea 0.8 needs transformers below 5.24, and takes seconds to import.
collect_ignore_glob = ["test_[!v]*.py"] if OF_GENERATE == "cache" else []


@pytest.fixture(scope="session")
def tokenizer():
    return AutoTokenizer.from_pretrained(resolve("smollm2-135m"))


@pytest.fixture(scope="session", autouse=True)
def _once_for_each_tokenizer():
    """Every backend makes the vocabulary of grammars, which takes half a second."""
    if collect_ignore_glob:
        yield
        return
    import llguidance.hf

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
    from support.lighthouse import OPTIONS

    from kvkeep.mellea import KVKeepBackend

    with KVKeepBackend(model, tokenizer, model_options=OPTIONS) as backend:
        yield backend
