"""Caches with a budget, with blocks of tokens or on the host begin with a store's exact slots."""

from __future__ import annotations

import pytest
import torch
from support.bits import alike
from support.policies import unnamed
from support.tiny_models import tiny

import kvkeep
from kvkeep.generate import Batch, SamplingParams
from kvkeep.store import Disk, PrefixStore
from kvkeep.store.beginning import observed_again

LENGTH = 100
AS_ONE_CHUNK = (
    "tova:24",
    "snapkv:24,window=8",
    "knorm:24",
    "keydiff:24,recent=4",
    "random:24",
    "adakv(snapkv:24,window=8)",
    "knorm:25%,least=8",
    "keep_all+kivi:4,together=8",
    "keep_all@host",
    "keep_all+int8@host",
)
"""Specs whose caches are those of one chunk."""
BY_LAST_QUERIES = (
    "h2o:24",
    "vlen:24",
    "qh2o:24",
    "qvlen:24+int8",
    "expected_attention:24,recent=4,future=8",
    "pyramid(h2o:24)",
)
"""Specs whose policies observe the last 64 queries of a text in place of all."""
OTHERS = ("window:24,sinks=2", "snapkv:24,window=8+int4@host", "h2o:24+fp8@fixed:24")
OTHERS += unnamed(AS_ONE_CHUNK + BY_LAST_QUERIES + OTHERS)


def ids(n=LENGTH, seed=3):
    return torch.randint(2, 96, (n,), generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def model():
    with kvkeep.attach(tiny("llama", max_position_embeddings=256)) as attachment:
        yield attachment.model


def one_chunk(model, spec, *chunks):
    cache = kvkeep.Cache(model, spec)
    with torch.inference_mode():
        for chunk in chunks:
            model(chunk[None], past_key_values=cache)
    return cache


def slots(cache):
    """All planes of all layers."""
    return [
        {(part, n): planes[n] for part, planes in layer.state().parts.items() for n in planes}
        for layer in cache.layers
    ]


def same(one, two):
    return all(
        a.keys() == b.keys() and all(alike(a[name], b[name]) for name in a)
        for a, b in zip(slots(one), slots(two), strict=True)
    )


def tokens_of(cache):
    """The positions that each head of each layer holds."""
    return [layer.positions().sort(dim=2).values.tolist() for layer in cache.layers]


@pytest.mark.parametrize("spec", AS_ONE_CHUNK + BY_LAST_QUERIES + OTHERS)
def test_what_the_store_holds_changes_no_slot(model, spec):
    """One store holds the whole text, one half of it, one nothing."""
    text, half, empty = ids(), PrefixStore(), PrefixStore()
    full = PrefixStore()
    for exact in ("keep_all", "keep_all+int8"):
        full.read(model, text, spec=exact)
        half.read(model, text[:50], spec=exact)
    caches = []
    for store, least in ((full, 30), (half, 30), (empty, 0)):
        cache, found = store.read(model, text, spec=spec, chunk=50)
        assert found >= least
        assert cache.fed == LENGTH
        caches.append(cache)
        store.check()
    assert tokens_of(caches[0]) == tokens_of(caches[1]) == tokens_of(caches[2])
    for other in caches[1:]:
        for one, two in zip(slots(caches[0]), slots(other), strict=True):
            for name in one:
                if one[name].is_floating_point():
                    torch.testing.assert_close(one[name], two[name], atol=1e-4, rtol=1e-3)
    again, found = full.read(model, text, spec=spec, chunk=50)
    assert found >= 30
    assert same(again, caches[0])  # what the first cache evicted and scored was its own
    with torch.inference_mode():
        logits = [model(ids(1, 5)[None], past_key_values=x).logits for x in (again, caches[0])]
    assert alike(logits[0], logits[1])


@pytest.mark.parametrize("spec", AS_ONE_CHUNK)
def test_it_is_what_one_chunk_gives(model, spec):
    """The same tokens; the same bits, where the model computes them in the same chunks."""
    text, store = ids(), PrefixStore()
    cache = store.read(model, text, spec=spec).cache
    expected = one_chunk(model, spec, text)
    if "int8" not in spec:
        assert tokens_of(cache) == tokens_of(expected)
    if not observed_again(cache):
        assert same(cache, expected)


@pytest.mark.parametrize("spec", BY_LAST_QUERIES)
def test_the_last_queries_decide(model, spec):
    """As if all had been one chunk in which the policy observed the last 64 tokens only."""
    text, store = ids(), PrefixStore()
    cache = store.read(model, text, spec=spec).cache
    exact = one_chunk(model, "keep_all", text[:36])
    expected = kvkeep.Cache(model, spec)
    expected.routed = True
    for layer, other in zip(expected.layers, exact.layers, strict=True):
        planes = other.state().parts["slots"]
        layer.extend(planes["k"], planes["v"])
    with torch.inference_mode():
        model(text[None, 36:], past_key_values=expected)
    assert same(cache, expected)


def test_a_window_begins_with_slots_that_saw_all(model):
    """Only then does it hide what lies farther back."""
    text, store = ids(), PrefixStore()
    cache = store.read(model, text, spec="window:24,sinks=2").cache
    exact = one_chunk(model, "keep_all", text)
    for layer, other in zip(cache.layers, exact.layers, strict=True):
        held, whole = layer.held(), other.held()
        at = held.position[0, 0].long()
        assert at.sort().values.tolist() == [0, 1, *range(76, 100)]
        assert held.keys.equal(whole.keys[:, :, at])


def test_codes_are_those_of_exact_slots(model):
    text, store = ids(), PrefixStore()
    cache = store.read(model, text, spec="knorm:24+int8").cache
    exact = store.read(model, text, spec="knorm:24").cache
    for layer, other in zip(cache.layers, exact.layers, strict=True):
        planes, plain = layer.state().parts["slots"], other.state().parts["slots"]
        assert planes["position"].equal(plain["position"])
        codes = layer.key_codec.encode(plain["k"])
        assert codes[""].equal(planes["k"])


def test_what_is_stored_is_shared_until_something_is_evicted(model):
    text, store = ids(), PrefixStore()
    store.read(model, text)
    keeps = store.find(model, text, spec="keep_all").cache
    assert keeps.shared_bytes == keeps.live_bytes == store.nbytes
    cache, found = store.find(model, text, spec="tova:24")
    assert (found, cache.fed) == (99, 99)
    entry = 99 * store.nbytes // LENGTH
    assert cache.shared_bytes == entry
    with torch.inference_mode():
        model(text[None, 99:], past_key_values=cache)
    assert cache.shared_bytes == 0
    assert cache.nbytes < 0.5 * entry


def test_short_texts_are_fed_whole(model):
    store = PrefixStore()
    for n in (1, 63, 64):
        cache, found = store.read(model, ids(n), spec="h2o:24")
        assert found == 0
        assert same(cache, one_chunk(model, "h2o:24", ids(n)))
    assert store.nbytes == 0


def test_a_text_that_the_store_cannot_hold_is_read_as_without_it(model):
    text = ids()
    token = PrefixStore()
    token.read(model, ids(1))
    store = PrefixStore(budget=30 * token.nbytes)
    for _ in range(2):
        cache = store.read(model, text, spec="h2o:24", chunk=64).cache
        assert same(cache, one_chunk(model, "h2o:24", text[:64], text[64:]))
        assert store.nbytes == 0
    store.read(model, text[:20])
    cache, found = store.read(model, text, spec="h2o:24", chunk=64)
    assert (found, cache.fed, cache.length) == (20, LENGTH, 24)


@pytest.mark.parametrize(
    "spec", ["snapkv:24,window=8", "keep_all+kivi:4,together=8", "h2o:24@host"]
)
def test_another_process_finds_it_on_disk(model, spec, tmp_path):
    text, found = ids(), []
    for _ in range(2):
        store = PrefixStore(backend=Disk(tmp_path), block=16)
        found.append(store.read(model, text, spec=spec))
    assert found[0].found == 0
    assert found[1].found >= 30
    assert tokens_of(found[0].cache) == tokens_of(found[1].cache)
    assert not list((tmp_path / "quarantine").glob("*"))


def test_one_entry_serves_all_budgets_and_codecs(model):
    text, store = ids(), PrefixStore()
    specs = [one for one in AS_ONE_CHUNK + BY_LAST_QUERIES + OTHERS if "int8@host" not in one]
    for index, spec in enumerate(specs):
        assert bool(store.read(model, text, spec=spec).found) == (index > 0)
    assert store.stats().entries == 1


def test_what_nothing_was_evicted_from_is_stored(model):
    """A conversation shorter than the budget; never scores, and never codes as exact slots."""
    text, store = ids(40), PrefixStore()
    cache = store.read(model, text[:20], spec="h2o:64").cache
    with torch.inference_mode():
        model(text[None, 20:], past_key_values=cache)
    assert store.learn(model, text, cache) == 40
    exact, found = store.read(model, text)
    assert found == 40
    assert all(
        set(state) == {("slots", "k"), ("slots", "v"), ("slots", "position")}
        for state in slots(exact)
    )
    before = store.nbytes
    for spec in ("h2o:64+int8", "h2o:24", "adakv(h2o:64)", "keep_all+kivi"):
        other = PrefixStore()
        cache = other.read(model, ids(50, 6), spec=spec).cache
        assert store.learn(model, ids(50, 6), cache) == 0
    assert store.nbytes == before
    assert store.stats().refused == 4


@pytest.mark.parametrize(
    "spec", ["snapkv:24,window=8", "h2o:24+int8", "keep_all+kivi", "keydiff:80"]
)
def test_generate(model, spec):
    """The second prompt begins like the first; the answers are those of its own."""
    kvkeep.detach(model)
    options = {"max_new_tokens": 6, "do_sample": False}
    prompts = [torch.cat([ids(), ids(80, seed)])[None] for seed in (5, 6)]
    alone = []
    for prompt in prompts:
        with kvkeep.attach(model, spec, store=PrefixStore()):
            alone.append(model.generate(prompt, **options))
    store = PrefixStore()
    with kvkeep.attach(model, spec, store=store):
        together = [model.generate(prompt, **options) for prompt in prompts]
    assert all(a.equal(b) for a, b in zip(alone, together, strict=True))
    assert store.stats().hit_tokens == LENGTH
    kvkeep.attach(model)


def test_a_batch_finds_what_others_stored(model):
    text, store = ids(), PrefixStore()
    store.read(model, text)
    batch = Batch(model, spec="h2o:24", store=store, chunk=16)
    answers = [batch.add(torch.cat([text, ids(n, n)]), SamplingParams(4))[0] for n in (5, 80)]
    list(batch)
    assert [answer.cached for answer in answers] == [LENGTH + 5 - 1 - 64, LENGTH]
    assert [(len(x.tokens), x.reason, x.error) for x in answers] == [(4, "length", None)] * 2
    assert store.stats().locked == 0


def test_windows_of_the_model():
    """A layer with a window of its own begins with its window; the others begin with all
    tokens."""
    model, text, store = tiny("gemma3", max_position_embeddings=256), ids(), PrefixStore()
    with kvkeep.attach(model):
        for n in (7, LENGTH):
            first = store.read(model, text[:n], spec="snapkv:24,window=8").cache
            again = store.read(model, text[:n], spec="snapkv:24,window=8").cache
            assert tokens_of(again) == tokens_of(first)
        assert tokens_of(first) == tokens_of(one_chunk(model, "snapkv:24,window=8", text))


@pytest.mark.parametrize("spec", ["keep_all", "window:8"])
def test_a_store_with_a_budget_serves_models_that_cache_a_latent(spec):
    with kvkeep.attach(tiny("deepseek-v3"), spec) as attachment:
        texts = [torch.cat([ids(30), ids(5, seed)]) for seed in (1, 2)]
        exact = PrefixStore()
        exact.read(attachment.model, ids(30))
        roomy, tight = PrefixStore(exact.nbytes), PrefixStore(exact.nbytes - 1)
        rows = roomy.prefill_rows(attachment.model, texts, spec=spec)
        assert rows is not None
        assert rows.fed == 30
        assert tight.prefill_rows(attachment.model, texts, spec=spec) is None
        assert roomy.read(attachment.model, ids(30), spec=spec).found == 30
