"""A cache that continues a DynamicCache, or keys and values computed elsewhere."""

from __future__ import annotations

from itertools import pairwise, product

import pytest
import torch
from support.pairwise import covering
from support.tiny_models import WINDOW, tiny
from transformers import DynamicCache, Lfm2Config, Lfm2ForCausalLM, StaticCache

import kvkeep
from kvkeep.errors import CapacityError, ShapeError, StateError, UnsupportedError
from kvkeep.store.beginning import begin

HELD = 15
IDS = torch.randint(3, 90, (2, 24), generator=torch.Generator().manual_seed(5))
REAL = torch.ones_like(IDS)
PADDED = REAL.clone()
PADDED[0, :5] = 0


def fed(model, cache, a, b, mask=REAL):
    place = (mask.cumsum(1) - 1).clamp(min=0)[:, a:b]
    with torch.no_grad():
        return model(
            IDS[:, a:b], attention_mask=mask[:, :b], position_ids=place, past_key_values=cache
        ).logits


def continued(model, cache, mask=REAL):
    """The logits of some chunks after the first 15 tokens."""
    ends = (HELD, HELD + 1, HELD + 5, HELD + 6)
    chunks = [fed(model, cache, a, b, mask) for a, b in pairwise(ends)]
    return torch.cat(chunks, dim=1)


def filled(model, mask=REAL, *, configured=True):
    theirs = DynamicCache(config=model.config) if configured else DynamicCache()
    fed(model, theirs, 0, HELD, mask)
    return theirs


@pytest.mark.parametrize(
    ("family", "attached", "padded", "configured"),
    covering(
        product(["llama", "mistral", "gemma3", "gemma4", "deepseek-v3"], *[[True, False]] * 3),
        tuple,
    ),
)
def test_it_goes_on_as_the_dynamic_cache(family, attached, padded, configured):
    mask = PADDED if padded else REAL
    model = tiny(family)
    theirs = filled(model, mask, configured=configured)
    if attached:
        kvkeep.attach(model)
    ours = kvkeep.Cache.from_dynamic(model, theirs, attention_mask=mask[:, :HELD])
    assert ours.seen.tolist() == mask[:, :HELD].sum(dim=1).tolist()
    assert ours.get_seq_length() == HELD
    found = continued(model, ours, mask)
    if attached:
        assert ours.routed
        kvkeep.detach(model)
    torch.testing.assert_close(found, continued(model, theirs, mask), atol=1e-4, rtol=1e-4)


def test_it_generates_on():
    model = tiny("mistral")
    expected = model.generate(IDS[:, : HELD + 1], max_new_tokens=8, do_sample=False)
    ours = kvkeep.Cache.from_dynamic(model, filled(model))
    with kvkeep.attach(model):
        found = model.generate(
            IDS[:, : HELD + 1], max_new_tokens=8, do_sample=False, past_key_values=ours
        )
    assert found.equal(expected)


@pytest.mark.parametrize(
    "spec",
    [
        "keep_all+int8",
        "keep_all+kivi",
        "keep_all@fixed:64",
        "keep_all@host",
        "window:8,sinks=2",
        "h2o:8",
        "h2o:8@fixed:16",
        "snapkv:8,window=4",
        "adakv(knorm:8)",
        "pyramid(h2o:8)",
    ],
)
def test_a_spec_applies_as_to_slots_of_a_store(spec):
    model = tiny("llama")
    with kvkeep.attach(model):
        text, expected = kvkeep.Cache(model), kvkeep.Cache(model, spec)
        fed(model, text, 0, HELD)
        pairs = [(k.clone(), v.clone()) for k, v, _ in text]
        begin(expected, text)
        found = kvkeep.Cache.from_dynamic(model, pairs, spec)
        assert continued(model, found).equal(continued(model, expected))
    for one, other in zip(found.layers, expected.layers, strict=True):
        assert one.positions().equal(other.positions())
        assert one.length == other.length


def test_the_keys_are_copied():
    model = tiny("llama")
    theirs = filled(model)
    ours = kvkeep.Cache.from_dynamic(model, theirs)
    expected = continued(model, filled(model))
    for layer in theirs.layers:
        layer.keys.zero_()
    torch.testing.assert_close(continued(model, ours), expected, atol=1e-4, rtol=1e-4)


def test_crop_fork_rows_and_snapshot():
    model = tiny("llama")
    ours = kvkeep.Cache.from_dynamic(model, filled(model))
    snapshot, fork = ours.snapshot(), ours.freeze().fork()
    expected = continued(model, ours)
    for cache in (fork, ours):
        cache.crop(-(cache.fed - HELD + 2))
        fed(model, cache, HELD - 2, HELD)
        torch.testing.assert_close(continued(model, cache), expected, atol=1e-4, rtol=1e-4)
    ours.restore(snapshot)
    ours.reorder([1, 0])
    ours.reorder([1, 0])
    torch.testing.assert_close(continued(model, ours), expected, atol=1e-4, rtol=1e-4)


def test_recurrent_states_come_along():
    torch.manual_seed(0)
    size = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    layers = ["conv", "full_attention"] * 2
    model = Lfm2ForCausalLM(Lfm2Config(**size, **heads, layer_types=layers)).eval()
    theirs = filled(model)
    with kvkeep.attach(model):
        found = continued(model, kvkeep.Cache.from_dynamic(model, theirs))
        with pytest.raises(UnsupportedError, match="recurrent layers, whose states"):
            kvkeep.Cache.from_dynamic(model, list(kvkeep.Cache(model)))
    torch.testing.assert_close(found, continued(model, theirs), atol=1e-4, rtol=1e-4)


def test_a_mask_that_was_not_given_hides_columns_in_the_next_forward():
    model = tiny("llama")
    theirs = filled(model, PADDED)
    with kvkeep.attach(model):
        found = continued(model, kvkeep.Cache.from_dynamic(model, theirs), PADDED)
    torch.testing.assert_close(found, continued(model, theirs, PADDED), atol=1e-4, rtol=1e-4)


def test_what_does_not_fit():
    model = tiny("mistral")
    make = kvkeep.Cache.from_dynamic
    pairs = [(layer.keys, layer.values) for layer in filled(model).layers]
    with pytest.raises(ShapeError, match="more than the 7 tokens with keys may have been fed"):
        make(model, pairs)
    assert make(model, pairs, attention_mask=REAL[:, :HELD]).fed == HELD
    short = [(k[:, :, 1:], v[:, :, 1:]) for k, v in pairs]
    with pytest.raises(ShapeError, match=rf"6 tokens of 15; give at least the newest {WINDOW - 1}"):
        make(model, short, attention_mask=REAL[:, :HELD])
    with pytest.raises(ShapeError, match="keys and values of 1 layers for a model in which 2 of 2"):
        make(model, pairs[:1])
    with pytest.raises(ShapeError, match=r"mask \(1, 15\) for 2 rows of 15"):
        make(model, pairs, attention_mask=REAL[:1, :HELD])
    with pytest.raises(ShapeError, match="between or behind tokens"):
        make(model, pairs, attention_mask=PADDED[:, :HELD].flip(1))
    llama = tiny("llama")
    whole = [(layer.keys, layer.values) for layer in filled(llama).layers]
    with pytest.raises(ShapeError, match="layer 0 has 15 tokens of 14; give 14"):
        make(llama, whole, attention_mask=REAL[:, : HELD - 1])
    with pytest.raises(CapacityError):
        make(llama, whole, "keep_all@fixed:8")
    with pytest.raises(ShapeError, match="values of 0 layers"):
        make(llama, [pair[:1] for pair in whole])
    with pytest.raises(ShapeError, match=r"keys \(2, 15, 8\) and values"):
        make(llama, [(k[:, 0], v[:, 0]) for k, v in whole])
    with pytest.raises(ShapeError, match=r"keys of \[1, 2\] rows"):
        make(llama, [whole[0], tuple(x[:1] for x in whole[1])])
    with pytest.raises(ShapeError, match=r"keys .* and values"):
        make(model, [(k, v[:, :, 1:]) for k, v in pairs], attention_mask=REAL[:, :HELD])
    with pytest.raises(UnsupportedError, match="made of a StaticCache; give a DynamicCache"):
        make(model, StaticCache(config=model.config, max_cache_len=20))
    with pytest.raises(UnsupportedError, match="made of a Cache; give a DynamicCache"):
        make(model, kvkeep.Cache(model))
    graded = [(k.clone().requires_grad_(), v) for k, v in whole]
    with pytest.raises(StateError, match="gradients"):
        make(llama, graded)


def test_an_empty_dynamic_cache():
    model = tiny("llama")
    with pytest.raises(ShapeError, match="keys and values of 0 layers"):
        kvkeep.Cache.from_dynamic(model, DynamicCache(config=model.config))


def test_update_names_it():
    model = tiny("llama")
    theirs = filled(model)
    with kvkeep.attach(model):
        cache = kvkeep.Cache(model)
        first, second = theirs.layers
        cache.update(first.keys, first.values, 0)
        with pytest.raises(StateError, match="from_dynamic"):
            cache.update(second.keys, second.values, 1)


def test_stores_and_compress_refuse_it():
    model = tiny("llama")
    store = kvkeep.PrefixStore()
    with kvkeep.attach(model):
        pairs = [(k[:1], v[:1]) for k, v, _ in filled(model)]
        ours = kvkeep.Cache.from_dynamic(model, pairs)
        with pytest.raises(StateError, match="keys computed elsewhere"):
            ours.compress(model, IDS[0, :HELD], "kvzip:50%")
        with pytest.raises(UnsupportedError, match="keys computed elsewhere"):
            store.insert(model, IDS[0, :HELD], ours)
