"""Models that add biases of their own to scores: Doge, by each key's values, and Inkling, by each
query and distance; and DiffLlama, which attends twice."""

from __future__ import annotations

import pytest
import torch
from support.autograd_gradients import error, gradients, in_float64, ordinary
from support.packed_logits import packed_logits
from support.random_ids import ids
from support.sweep_configs import few_layers
from torch import nn
from transformers import DynamicCache

import kvkeep
from kvkeep.attention import dispatch
from kvkeep.errors import SpecError, UnsupportedError
from kvkeep.hf.cache_argument import as_cache
from kvkeep.hf.kinds import layer_geometries, layer_kinds
from kvkeep.train import backward

pytestmark = pytest.mark.usefixtures("one_thread")

TOKENS, CHUNKS = 24, (5, 1, 11, 7)
FEW = 6
"""The tokens that a query of Doge sees, of 24."""


@torch.no_grad()
def fed(model, cache, text, chunks=CHUNKS):
    """The logits of a text (B, n), in chunks."""
    parts = text.split(list(chunks), dim=1)
    return torch.cat([model(part, **as_cache(model, cache)).logits for part in parts], dim=1)


@torch.no_grad()
def whole(model, text):
    return model(text, use_cache=False).logits


def close(found, expected, atol=1e-5):
    torch.testing.assert_close(found, expected, atol=atol, rtol=1e-4)


def by_reference(q, view, options):
    return dispatch(q, view, options, "reference")


def evicting(model, spec, monkeypatch):
    """Two caches of a spec: steps of the second one are computed by the reference backend."""
    caches = [kvkeep.Cache(model, spec) for _ in range(2)]
    found = fed(model, caches[0], ids(1, TOKENS))
    for layer in caches[1].layers:
        layer.plans = False
    with monkeypatch.context() as changed:
        changed.setattr("kvkeep.layer.step.dispatch", by_reference)
        close(found, fed(model, caches[1], ids(1, TOKENS)), atol=1e-3)
    for one, other in zip(*(cache.layers for cache in caches), strict=True):
        assert one.positions().sort().values.equal(other.positions().sort().values)
    return caches[0]


# -- Doge ---------------------------------------------------------------------------------------


def doge(few=FEW):
    """With biases that differ, but not by so much that scores are rounded."""
    model = few_layers("doge")
    model.config.keep_window_size = few
    for layer in model.model.layers:
        layer.self_attn.keep_window_size = few
        nn.init.uniform_(layer.self_attn.A, 0.02, 0.1)
    return model


def test_a_query_sees_the_keys_of_the_largest_biases():
    # Equal tokens would have equal biases.
    model, text = doge(), torch.randperm(94, generator=torch.Generator().manual_seed(1))[None, :24]
    expected = whole(model, text)
    assert (whole(doge(TOKENS), text) - expected)[:, FEW:].abs().max() > 1e-2
    with kvkeep.attach(model):
        cache = kvkeep.Cache(model)
        close(fed(model, cache, text), expected)
        assert {layer.length for layer in cache.layers} == {TOKENS}
        parts = [text[0, :n] for n in (FEW - 1, 17, 9)]
        logits = torch.cat([whole(model, part[None])[:, -1] for part in parts])
        close(packed_logits(model, parts), logits)
    with in_float64(model.double()):
        backward(model, text, text, chunk=7)
        found = gradients(model)
        ordinary(model, text, text).backward()
    assert error(found, gradients(model)) < 1e-9


def test_what_a_choice_by_biases_excludes():
    model = doge()
    with pytest.raises(SpecError, match="chooses the tokens of a chunk at once"):
        kvkeep.Cache(model, "h2o:9,step=2")
    with pytest.raises(UnsupportedError, match="chooses the tokens that a query sees by a bias"):
        kvkeep.attach(model, compile=True)
    kvkeep.attach(doge(128), compile=True)


@pytest.mark.parametrize("few", [FEW, TOKENS])
def test_a_bias_follows_its_key(few, monkeypatch):
    model = doge(few)
    with kvkeep.attach(model):
        evicting(model, "h2o:9", monkeypatch)
        exact = whole(model, ids(1, TOKENS))
        for spec in ("keep_all+int4", "keep_all+kivi"):
            found = fed(model, kvkeep.Cache(model, spec), ids(1, TOKENS))
            assert (found - exact).abs().max() < 0.5 * exact.abs().max()


def test_keys_of_another_cache_have_no_bias():
    model, text = few_layers("doge"), ids(1, 9)
    unattached = kvkeep.Cache(model)
    close(fed(model, unattached, text, (4, 5)), whole(model, text))
    own = DynamicCache(config=model.config)
    fed(model, own, text, (9,))
    with pytest.raises(UnsupportedError, match="a bias that keys and values alone do not tell"):
        kvkeep.Cache.from_dynamic(model, own)
    with kvkeep.attach(model):
        cache = kvkeep.Cache(model)
        fed(model, cache, text, (9,))
    for layer, (keys, values, *_) in zip(own.layers, cache, strict=True):
        close(keys, layer.keys)
        close(values, layer.values)


# -- DiffLlama ----------------------------------------------------------------------------------


def test_slots_hold_two_heads():
    model, text = few_layers("diffllama"), ids(1, TOKENS)
    (own,) = set(layer_geometries(model.config))
    assert (own.heads, own.key_width, own.value_width) == (2, 16, 16)
    own, expected = DynamicCache(config=model.config), whole(model, text)
    fed(model, own, text[:, :20], (20,))
    unattached = kvkeep.Cache(model)
    close(fed(model, unattached, text), expected)
    cache = kvkeep.Cache.from_dynamic(model, own)
    for layer, (keys, values, *_) in zip(own.layers, cache, strict=True):
        assert keys.equal(layer.keys)
        assert values.equal(layer.values)
    with kvkeep.attach(model):
        close(fed(model, cache, text[:, 20:], (1, 3)), expected[:, 20:])


def test_weights_and_expected_queries_of_two_heads():
    model, text = few_layers("diffllama"), ids(1, TOKENS)
    model.set_attn_implementation("eager")  # others return no weights
    with torch.no_grad():
        expected = model(text, output_attentions=True, use_cache=False).attentions
        with kvkeep.attach(model):
            cache = kvkeep.Cache(model)
            found = model(text, cache=cache, output_attentions=True).attentions
            cache = kvkeep.Cache(model, "expected_attention:9")
            fed(model, cache, text)
    assert cache.length == 9
    for one, other in zip(found, expected, strict=True):
        close(one, other)


# -- Inkling ------------------------------------------------------------------------------------

INKLING = ["inkling_text", "inkling2_text", "inkling2_loop_text"]


def inkling(kind, extent=5):
    """Biases of full layers end at a distance; scores grow with the position from the fourth on."""
    model = few_layers(kind)
    model.config.log_scaling_n_floor = 4
    for module in model.modules():
        if hasattr(module, "log_scaling_n_floor"):
            module.log_scaling_n_floor = 4
        if isinstance(getattr(module, "proj", None), nn.Parameter):
            module.rel_extent = min(extent, module.rel_extent)
            module.proj = nn.Parameter(module.proj[:, :extent].detach().clone())
    return model


@pytest.mark.parametrize("kind", INKLING)
def test_biases_by_query_and_distance(kind, monkeypatch):
    model, text = inkling(kind), ids(1, TOKENS)
    expected = whole(model, text)
    scale = float(expected.abs().max())
    with kvkeep.attach(model) as attachment:
        cache = kvkeep.Cache(model)
        assert attachment.attention == attachment.layers == len(layer_kinds(model.config))
        close(fed(model, cache, text), expected, atol=1e-4 * scale)
        parts = [text[0, :n] for n in (5, 17, 9)]
        logits = torch.cat([whole(model, part[None])[:, -1] for part in parts])
        close(packed_logits(model, parts), logits, atol=1e-4 * scale)
        cache = evicting(model, "h2o:7", monkeypatch)
        assert cache.length == 7
        evicting(model, "adakv(h2o:9)+int8", monkeypatch)


@pytest.mark.parametrize("kind", INKLING)
def test_a_bias_of_a_kept_token_is_that_of_its_distance(kind):
    """Of an evicting cache: the first tokens and the last, against all others masked."""
    model, text = inkling(kind), ids(1, TOKENS)
    with kvkeep.attach(model):
        logits = [
            fed(model, kvkeep.Cache(model, spec), text, chunks)
            for spec, chunks in (("window:6,sinks=2", CHUNKS), ("window:6,sinks=2", (TOKENS,)))
        ]
    close(*logits, atol=1e-4 * float(logits[0].abs().max()))


def test_layers_that_read_states_of_earlier_layers_have_no_gradients():
    with pytest.raises(UnsupportedError, match="inkling2_text passes more than hidden states"):
        backward(few_layers("inkling2_text"), ids(1, 9), ids(1, 9))


def test_gradients_of_biases():
    model, text = inkling("inkling_text").double(), ids(1, TOKENS)
    model.set_experts_implementation("eager")  # torch's own takes no float64
    with in_float64(model):
        backward(model, text, text, chunk=7)
        found = gradients(model)
        ordinary(model, text, text).backward()
    assert error(found, gradients(model)) < 1e-9
