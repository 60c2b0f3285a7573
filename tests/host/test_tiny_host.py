"""A model of no known library, through stores and blocks by what its host tells of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.tiny_host import TinyHost, TinyModel, tiny_model
from torch import nn

from kvkeep.blocks import join, prefill
from kvkeep.blocks.join import join_at
from kvkeep.blocks.recomputation import blend
from kvkeep.errors import SpecError, UnsupportedError
from kvkeep.host import Host, host_of, register
from kvkeep.host.cache import bytes_of, token_limit
from kvkeep.store import Disk, Memory, PrefixStore

pytestmark = pytest.mark.usefixtures("without_gradients")

CLOSE = {"atol": 2e-5, "rtol": 1e-4}


@pytest.fixture
def model():
    return tiny_model()


def text(length, seed=0):
    return torch.randint(0, 61, (length,), generator=torch.Generator().manual_seed(seed))


def follows(model, cache, token):
    """The logits (V,) after one more token."""
    return host_of(model).forward(torch.tensor([[int(token)]]), cache)[0, -1]


@pytest.mark.parametrize("kind", ["none", "memory", "disk"])
@pytest.mark.parametrize("spec", ["keep_all", "keep_all+int8"])
def test_a_stored_prefix_is_found_and_gives_the_same_logits(model, tmp_path, kind, spec):
    make = {"none": lambda: None, "memory": Memory, "disk": lambda: Disk(tmp_path / "blocks")}
    backend = make[kind]()
    store = PrefixStore(backend=backend, block=4)
    first, second = text(20), torch.cat([text(16), text(6, 1)])
    assert store.read(model, first, spec=spec).found == 0
    if backend is not None:
        store = PrefixStore(backend=backend, block=4)
    cache, found = store.read(model, second[:-1], spec=spec)
    assert (found, cache.fed) == (16, 21)
    computed = PrefixStore().read(model, second[:-1], spec=spec).cache
    logits = follows(model, cache, second[-1])
    torch.testing.assert_close(logits, follows(model, computed, second[-1]), **CLOSE)
    if spec == "keep_all":
        torch.testing.assert_close(logits, model(second[None])[0, -1], **CLOSE)


def test_other_weights_find_nothing(model):
    store = PrefixStore()
    store.read(model, text(20))
    model.layers[1].v.weight[0, 0] += 1
    assert store.read(model, text(20)).found == 0


def test_what_does_not_fit_the_budget_is_refused_by_its_size(model):
    host = host_of(model)
    cache = host.new_cache()
    promised = bytes_of(cache, host.geometries(), 9)
    host.feed(text(9)[None], cache)
    assert promised == cache.live_bytes


def joined(model, texts, again):
    """The logits (V,) after the last token of texts computed separately, each followed by the
    next, when the tokens at the positions `again` were then computed knowing all before them.

    Those tokens stand twice in one forward: as their own text has them, then as they are later.
    """
    ids = torch.cat(texts)
    again = torch.tensor([*again, len(ids) - 1])  # the last token sees everything too
    owner = torch.repeat_interleave(torch.arange(len(texts)), torch.tensor(list(map(len, texts))))
    position = torch.cat([torch.arange(len(ids)), again])
    known = torch.ones(len(position), dtype=torch.bool)
    known[again] = False  # those who know all before them see the later one of the two
    visible = known.repeat(len(position), 1)
    visible[: len(ids)] = nn.functional.pad(owner[:, None] == owner, (0, len(again)))
    visible &= position <= position[:, None]
    return model(ids[position][None], visible, position)[0, -1]


@pytest.mark.parametrize(
    ("recompute", "again"),
    [(0, []), ("boundary:2", [7, 8, 12, 13]), ("all", list(range(7, 18)))],
)
def test_texts_in_new_places(model, recompute, again):
    texts = [text(n, seed) for seed, n in enumerate((7, 5, 6))]
    store = PrefixStore()
    store.read(model, texts[2])  # at other positions than it will have
    cache = prefill(model, texts, recompute=recompute, store=store)
    last = text(1, 9)
    torch.testing.assert_close(
        follows(model, cache, last), joined(model, [*texts, last], again), **CLOSE
    )


def test_the_tokens_that_differ_most_are_computed_again(model):
    texts = [text(n, seed) for seed, n in enumerate((7, 5, 6))]
    caches = [PrefixStore().read(model, one).cache for one in texts]
    host, last = host_of(model), text(1, 9)
    cache = join_at(host, caches, [0, 7, 12], 18)
    candidates = torch.arange(7, 18)
    none = torch.zeros(11, dtype=torch.bool)
    found = blend(host, cache, torch.cat(texts), candidates, certain=none, count=4)
    assert len(found.positions) == 4
    assert 0 < found.deviation < 1
    again = found.positions.tolist()
    torch.testing.assert_close(
        follows(model, cache, last), joined(model, [*texts, last], again), **CLOSE
    )


def test_join_of_what_was_fed_by_hand(model):
    host, texts, last = host_of(model), [text(4, 4), text(6, 6)], text(1)
    caches = [host.new_cache(), host.new_cache()]
    for cache, ids in zip(caches, texts, strict=True):
        host.feed(ids[None], cache)
    torch.testing.assert_close(
        follows(model, join(model, caches), last), joined(model, [*texts, last], []), **CLOSE
    )


def test_a_cache_for_the_models_layers(model):
    host = host_of(model)
    assert token_limit(host.new_cache("keep_all@fixed")) == model.context
    assert token_limit(host.new_cache("keep_all@fixed", capacity=9), 1) == 9
    assert token_limit(host.new_cache()) is None
    assert host.new_cache({"full": "window:8"}).specs == host.new_cache(["window:8"] * 3).specs
    with pytest.raises(SpecError, match=r"the model has .'full'"):
        host.new_cache({"sliding_attention": "window:8"})


def test_what_a_library_does_not_offer_is_refused(model):
    class Bare(TinyHost):
        narrows, narrowed, layerwise = Host.narrows, Host.narrowed, Host.layerwise

    host = Bare(model)
    with pytest.raises(UnsupportedError, match=r"no gradients through a cache for tiny.*implement"):
        host.layerwise(text(4)[None])
    cache = join_at(host, [PrefixStore().read(model, text(4)).cache], [0], 4)
    none = torch.zeros(4, dtype=torch.bool)
    with pytest.raises(UnsupportedError, match=r"use recompute='boundary:32' or 'all'"):
        blend(host, cache, text(4), torch.arange(4), certain=none, count=1)


def test_models_of_unknown_libraries():
    with pytest.raises(UnsupportedError, match=r"Linear is not a model of transformers.*register"):
        host_of(nn.Linear(2, 2))


def test_a_host_serves_derived_classes_and_wrapped_models(model):
    class Derived(TinyModel):
        pass

    class Own(TinyHost):
        pass

    assert type(host_of(Derived())) is TinyHost
    register(Derived, Own)
    assert type(host_of(Derived())) is Own
    compiled = nn.Module()
    compiled._orig_mod = model  # as torch.compile has it
    assert host_of(compiled).model is compiled


def test_nothing_imports_transformers():
    """And kvkeep by itself not even torch."""
    code = """
import sys
import kvkeep
assert not {"torch", "transformers"} & {*sys.modules}
kvkeep.CacheSpec
import kvkeep.choice
assert "torch._dynamo" not in sys.modules
import torch
from support.tiny_host import tiny_model
import kvkeep_lab.evals.run, kvkeep.finetune.data, kvkeep.serve.engine
from kvkeep.blocks import prefill
from kvkeep_lab.evals.kept_positions import fed, kept
from kvkeep.store import Memory, PrefixStore
from kvkeep.train import backward

model, texts = tiny_model(), torch.arange(40).split(10)
store = PrefixStore(backend=Memory(), block=4)
assert store.prefill(model, texts[0]).fed == 9
assert store.read(model, texts[0]).found == 9
assert prefill(model, texts, recompute=0.2, store=store).fed == 40
ids = torch.arange(40)[None]
backward(model, ids, ids, cache="h2o:9", chunk=7)
kept(fed(model, ids, "h2o:9"))
found = [name for name in sys.modules if name.startswith(("transformers", "kvkeep.hf"))]
assert not found, found
"""
    tests = Path(__file__).parents[1]
    paths = [str(tests), *filter(None, sys.path)]
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {paths!r}\n{code}"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert not done.returncode, done.stderr
