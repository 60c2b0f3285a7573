"""Codecs on models whose keys have a few channels thirty times as large as the rest."""

from __future__ import annotations

import runpy
import warnings
from pathlib import Path

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

import kvkeep
from kvkeep.codec import base
from kvkeep.errors import PrecisionWarning, UnsupportedError

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
large_channels = runpy.run_path(str(BENCHMARKS / "large_key_channels.py"))["large_channels"]

KINDS = ("scaled", "turned", "bias")


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=96,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=256,
        initializer_range=0.09,  # attention that tells tokens apart
    )
    return Qwen2ForCausalLM(config).eval()


@torch.no_grad()
def predicted(model, spec):
    """Log-probabilities (128, vocabulary) after each of the last 128 tokens, float64."""
    ids = torch.randint(96, (1, 256), generator=torch.Generator().manual_seed(1))
    logits = model(ids, past_key_values=kvkeep.Cache(model, spec)).logits
    return logits[0, 128:].double().log_softmax(dim=-1)


def divergence(model, spec):
    full, other = (predicted(model, s) for s in ("keep_all", spec))
    return float((full.exp() * (full - other)).sum(dim=-1).mean())


@pytest.mark.parametrize("kind", KINDS)
def test_advised_codecs_bear_large_key_channels(model, kind):
    with large_channels(model, kind):
        bare = divergence(model, "keep_all+int4:centre=0,recent=0,sinks=0")
        assert divergence(model, "keep_all+int8/int4") < 0.02 < bare
        assert divergence(model, "keep_all+int4") < 0.02


@pytest.mark.parametrize("kind", ["scaled", "turned"])
def test_planting_changes_no_prediction_and_is_undone(model, kind):
    full = predicted(model, "keep_all")
    with large_channels(model, kind):
        assert (predicted(model, "keep_all") - full).abs().max() < 1e-3
    assert torch.equal(predicted(model, "keep_all"), full)


@pytest.mark.parametrize(
    ("kind", "message"), [("x", "use scaled, turned, bias"), ("bias", "Linear has no q_proj")]
)
def test_planting_is_refused(kind, message):
    other = torch.nn.Linear(2, 2)
    with pytest.raises(UnsupportedError, match=message), large_channels(other, kind):
        pass


@pytest.mark.parametrize(
    ("spec", "warned"),
    [
        ("keep_all+int4:centre=0", 1),
        ("h2o:8+int4:centre=0/plain", 1),
        ("keep_all+int4", 0),
        ("keep_all+int8/int4", 0),
    ],
)
def test_four_bits_for_keys_warn_once(model, spec, warned):
    base._warn_once.cache_clear()
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        for _ in range(2):
            kvkeep.Cache(model, spec)
    found = [w for w in given if w.category is PrecisionWarning]
    assert len(found) == warned
    assert all("use +int8/int4" in str(w.message) for w in found)
