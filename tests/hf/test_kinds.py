"""Kinds of models: what a config says by them, and why a model lacks a feature."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from support.random_ids import ids
from support.sweep_configs import model_of
from support.tiny_models import tiny

import kvkeep
from kvkeep import UnsupportedError
from kvkeep.features import Feature
from kvkeep.hf import kinds
from kvkeep.hf.kinds.base import Kind
from kvkeep.host import LayerKind
from kvkeep.planes import Chunks


class Fenced(Kind):
    """Layers of a type that no other kind knows."""

    lacks: ClassVar = {Feature.TRAINED: "has fences, which stop gradients"}

    def has(self, text):
        return "fenced" in (getattr(text, "layer_types", None) or ())

    def types(self, text):
        return {"fenced": LayerKind("fenced", Chunks(4))}


@pytest.fixture
def config():
    config = tiny("llama", num_hidden_layers=3).config
    config.__dict__["layer_types"] = ["full_attention", "fenced", "mlp"]
    return config


def test_a_new_kind_is_one_class(config, monkeypatch):
    with pytest.raises(UnsupportedError, match="layers of type fenced"):
        kinds.layer_kinds(config)
    monkeypatch.setattr(kinds, "_KINDS", (*kinds._KINDS, Fenced()))
    full, fenced = kinds.layer_kinds(config)
    assert (full.name, full.place, full.window) == ("full_attention", 0, None)
    assert (fenced.name, fenced.place, fenced.window) == ("fenced", 1, 4)
    assert kvkeep.Cache(config).layers[1].kind.endswith("window=4 chunked")
    assert kvkeep.Cache(config).why_not(Feature.TRAINED) == "has fences, which stop gradients"
    kinds.require(config, Feature.COMPILED, "")
    with pytest.raises(UnsupportedError, match=r"llama has fences, which stop gradients; do not$"):
        kinds.require(config, Feature.TRAINED, "do not")


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("llama", set()),
        ("deepseek_v3", {"Latent"}),
        ("glm_moe_dsa", {"Latent", "Indexed"}),
        ("hy_v4", {"Latent", "Indexed", "SharesChoice"}),
        ("gemma4_text", {"Shared"}),
        ("lfm2", {"Recurrent"}),
        ("kimi_linear", {"Latent", "Recurrent"}),
        ("qwen4_exp_text", {"Indexed", "Compressed", "Recurrent"}),
        ("minimax_m3_vl_text", {"Indexed", "Blocks"}),
        ("dory", {"Looped"}),
        ("doge", {"Weighed"}),
        ("inkling_text", {"Recurrent"}),
        ("inkling2_loop_text", {"Recurrent", "Residuals", "Looped"}),
    ],
)
def test_kinds_of_models(name, found):
    assert {type(kind).__name__ for kind in kinds.kinds_of(model_of(name))} == found


def test_states_beside_the_layers_are_a_collection():
    for name, some in (("llama", False), ("lfm2", True)):
        model = model_of(name)
        with kvkeep.attach(model), torch.no_grad():
            cache = kvkeep.Cache(model)
            model(torch.ones(1, 4, dtype=torch.int64), past_key_values=cache)
        assert bool(cache.carried) == bool(cache.carried.tensors()) == some
        assert cache.carried.returns_to(4)
        assert cache.carried.returns_to(3) != some
        cache.mark()
        assert list(cache.carried.marks) == [4] * some
        with pytest.raises(AttributeError, match=r"is now Cache\.carried"):
            _ = cache.recurrent


def test_layers_that_run_several_times_have_keys_for_each_run():
    model = model_of("dory")  # layers 1 and 2 run twice
    text = ids(1, 24)
    with torch.no_grad():
        expected = model(text, use_cache=False).logits
        with kvkeep.attach(model):
            cache = kvkeep.Cache(model)
            parts = text.split([9, 1, 14], dim=1)
            found = torch.cat([model(part, cache=cache).logits for part in parts], dim=1)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=2e-4)
    assert [kind.place for kind in kinds.layer_kinds(model.config)] == [0, 1, 2, 3, 4, 5]
    assert [layer.window for layer in cache.layers] == [8, None, 8, None, None, 8]
    model.config.recurrent_kv_cache_mode = "last_loop"
    with pytest.raises(UnsupportedError, match="recurrent_kv_cache_mode='per_loop'"):
        kvkeep.attach(model)
