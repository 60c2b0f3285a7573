"""Joined texts in caches with a budget, with blocks of tokens or on the host."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from support.block_texts import model_of, text
from support.policies import unnamed
from support.slow import every
from support.tiny_models import tiny

import kvkeep
from kvkeep.blocks import Block, Prompt, join, prefill
from kvkeep.errors import StateError, UnsupportedError
from kvkeep.store import PrefixStore

SPECS = (
    "window:24,sinks=2",
    "h2o:24",
    "vlen:24",
    "qh2o:24+int8",
    "qvlen:24",
    "tova:24",
    "snapkv:24,window=4",
    "knorm:24",
    "keydiff:24,recent=4",
    "expected_attention:24,recent=4,future=8",
    "random:24",
    "pyramid(h2o:24)",
    "adakv(h2o:24)",
    "keep_all+kivi:4,together=8",
    "keep_all@host",
    "h2o:24+int8@host",
    "h2o:24@fixed:24",
)
SPECS += unnamed(SPECS)


def texts(lengths, seed=3):
    draw = torch.Generator().manual_seed(seed)
    return [torch.randint(2, 96, (n,), generator=draw) for n in lengths]


@pytest.fixture
def model():
    with kvkeep.attach(tiny("llama", max_position_embeddings=256)) as attachment:
        yield attachment.model


def written(model, spec, exact):
    """A cache to which the tokens of an exact one were written, as if they had just been fed."""
    cache = kvkeep.Cache(model, spec, capacity=24)
    cache.restored = kvkeep.Cache(model)
    cache.restored.restore(exact.snapshot())  # keys are turned to their positions, for good
    for layer, other in zip(cache.layers, cache.restored.layers, strict=True):
        planes = other.state().parts["slots"]
        layer.extend(planes["k"], planes["v"], planes["position"][0, 0])
    cache.routed = True
    return cache


@pytest.mark.parametrize(("recompute", "spec"), every(2, product([0, 0.3], SPECS)))
def test_joined_texts(model, spec, recompute):
    """As if their exact slots had been written, and evicted after the next forward."""
    store, parts, (tail,) = PrefixStore(), texts((20, 33, 17)), texts((9,), seed=4)
    exact = prefill(model, parts, store=store, recompute=recompute)
    cache = prefill(model, parts, store=store, recompute=recompute, spec=spec)
    assert cache.fed == 70
    expected = written(model, spec, exact)
    with torch.inference_mode():
        for part in (tail[:8], tail[8:], parts[0]):
            one, two = (model(part[None], past_key_values=x).logits for x in (cache, expected))
            torch.testing.assert_close(one, two, atol=1e-4, rtol=1e-3)
    for layer, other in zip(cache.layers, expected.layers, strict=True):
        assert layer.positions().sort(dim=2).values.equal(other.positions().sort(dim=2).values)
        assert layer.history.joined
    before = store.nbytes
    fed = torch.cat([*parts, tail, parts[0]])
    assert store.learn(model, fed, cache) == 0
    assert store.nbytes == before


def test_join(model):
    parts = texts((20, 33))
    caches = []
    for part in parts:
        caches.append(kvkeep.Cache(model))
        with torch.inference_mode():
            model(part[None], past_key_values=caches[-1])
    (tail,) = texts((9,), seed=4)
    cache = join(model, caches, "snapkv:24,window=4@host")
    with torch.inference_mode():
        logits = [model(tail[None], past_key_values=x).logits for x in (cache, join(model, caches))]
    torch.testing.assert_close(*logits, atol=1e-4, rtol=1e-3)
    assert cache.length == 24
    assert join(model, caches, "keep_all").length == 53
    with pytest.raises(StateError, match="begins with caches of keep_all\\+int8"):
        join(model, caches, "keep_all+int8@host")
    scored = kvkeep.Cache(model, "h2o:40")
    with torch.inference_mode():
        model(parts[0][None], past_key_values=scored)
    with pytest.raises(UnsupportedError, match="give join\\(\\) the spec of the result"):
        join(model, [scored])


@pytest.mark.parametrize(
    "spec", ["snapkv:64,window=8", "h2o:64+int8", "keep_all+kivi", "h2o:64@host"]
)
def test_prompts(tokenizer, spec):
    """Blocks are found in any order; the last tokens are fed to the cache, which evicts then."""
    model, store = model_of(), PrefixStore()
    kvkeep.attach(model, spec, store=store)
    one, two, three = (Block(text(seed)) for seed in (1, 2, 3))
    question = " ".join(["Where is the keeper?"] * 20)
    first = Prompt(["Read this.\n", one, "\n", two, "\n", question]).encode(tokenizer)
    cache, report = first.prefill(model, store=store, spec=spec)
    assert report.found == 0
    assert report.approximate > 0
    again = Prompt(["Look:\n", two, "\n", three, "\n", one, "\n", question]).encode(tokenizer)
    cache, report = again.prefill(model, store=store, spec=spec)
    assert report.tokens == cache.fed == again.input_ids.shape[1] - 1
    assert report.found > 60
    assert not any(block.refused for block in report.blocks)
    assert cache.layers[0].history.joined
    if "kivi" not in spec:
        assert cache.length == 64
    found = model.generate(again, max_new_tokens=4, do_sample=False)
    assert found.shape == (1, again.input_ids.shape[1] + 4)
    assert again.report.found > report.found  # the third block too, now


def test_a_block_at_the_end(tokenizer):
    """Its last tokens are fed again, as those of any prompt are."""
    model, store = model_of(), PrefixStore()
    kvkeep.attach(model, store=store)
    encoded = Prompt(["Read this.\n", Block(text(1, 200))]).encode(tokenizer)
    cache, report = encoded.prefill(model, store=store, spec="h2o:64")
    (block,) = report.blocks
    known = encoded.input_ids.shape[1] - 1 - 64
    assert report.approximate + report.repaired == known - block.start
    assert (cache.fed, cache.length) == (known + 64, 64)


def test_without_a_block_the_store_reads_it(tokenizer):
    model, store = model_of(), PrefixStore()
    kvkeep.attach(model, store=store)
    encoded = Prompt([text(1, 200)]).encode(tokenizer)
    wanted = store.prefill(model, encoded.input_ids, spec="tova:64")
    for _ in range(2):
        cache, report = encoded.prefill(model, store=store, spec="tova:64")
        assert report.exact == cache.fed - 1
        assert cache.layers[1].positions().equal(wanted.layers[1].positions())
