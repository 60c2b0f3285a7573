"""`generate` with a store: the same text, of which the beginning is never computed twice."""

from __future__ import annotations

import copy

import pytest
import torch
from support.tiny_models import tiny

import kvkeep
from kvkeep.errors import ShapeError, UnsupportedError
from kvkeep.store import Disk, PrefixStore

OPTIONS = {"max_new_tokens": 8, "do_sample": False}


def ids(n, seed=3):
    return torch.randint(2, 96, (1, n), generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def fed(monkeypatch):
    """Columns that were fed to any cache."""
    counted = []
    admit = kvkeep.Cache.admit

    def counting(cache, n):
        counted.append(n)
        admit(cache, n)

    monkeypatch.setattr(kvkeep.Cache, "admit", counting)
    return counted


@pytest.mark.parametrize(
    ("family", "spec"),
    [
        *(("llama", spec) for spec in ("keep_all", "keep_all+int8", "keep_all@fixed:128")),
        *((family, "keep_all+int8") for family in ("qwen3", "gpt-neox", "gpt2")),
    ],
)
def test_a_conversation(family, spec, fed):
    model, store = tiny(family), PrefixStore()
    turns = [ids(20), ids(7, seed=4), ids(9, seed=5)]
    plain, with_store = [], []
    for found, attached in (
        (plain, kvkeep.attach(copy.deepcopy(model), spec)),
        (with_store, kvkeep.attach(model, spec, store=store)),
    ):
        text = torch.zeros(1, 0, dtype=torch.int64)
        for turn in turns:
            fed.clear()
            text = attached.model.generate(torch.cat([text, turn], dim=1), **OPTIONS)
            found.append(text)
            new = turn.shape[1] + OPTIONS["max_new_tokens"]
            if found is with_store:  # the last token of an answer was not fed before
                assert sum(fed) in (new - 1, new)
    for one, two in zip(plain, with_store, strict=True):
        assert one.equal(two)
    assert store.stats().hits == 2
    store.check()


def test_what_a_store_does_not_serve():
    model, store = tiny("llama"), PrefixStore()
    with kvkeep.attach(model, store=store):
        two = torch.cat([ids(9), ids(9, seed=4)])
        mask = torch.ones(1, 9, dtype=torch.int64)
        mask[0, :3] = 0
        model.generate(two, **OPTIONS)
        model.generate(ids(9), attention_mask=mask, **OPTIONS)
        model.generate(ids(9), past_key_values=kvkeep.Cache(model), **OPTIONS)
        model.generate(ids(9), use_cache=False, **OPTIONS)
        assert store.stats().asked_tokens == store.nbytes == 0
    assert "generate" not in model.__dict__


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"num_return_sequences": 3, "num_beams": 3}])
def test_several_answers_share_the_prompt(options):
    model, store = tiny("llama"), PrefixStore()
    expected = model.generate(ids(20), **OPTIONS, **options)
    with kvkeep.attach(model, store=store):
        for _ in range(2):
            assert model.generate(ids(20), **OPTIONS, **options).equal(expected)
    assert store.stats().hit_tokens == 19
    assert store.stats().tokens == 19


def test_identities():
    """Another model, spec, namespace or attention never sees the entries."""
    model, store, prompt = tiny("llama"), PrefixStore(), ids(30)[0]
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.model.layers[1].mlp.up_proj.weight[0, 0] += 0.01

    def hits(model, **options):
        before = store.stats().hit_tokens
        store.prefill(model, prompt, **options)
        return store.stats().hit_tokens - before

    assert hits(model) == 0
    assert hits(model) == 29
    assert hits(other) == 0
    assert hits(model, spec="keep_all+int8") == 0
    assert hits(model, namespace="b") == 0
    with kvkeep.attach(model):
        assert hits(model) == 0
        assert hits(model) == 29
    assert hits(model, spec="keep_all@fixed:64") == 29  # where slots lie does not matter
    assert hits(model, spec="window:40") == 29  # nor what will be evicted later
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(1.01)
    assert hits(model) == 0


def test_bit_for_bit():
    """A hit goes on as the cache went on that was never stored."""
    model, store, prompt = tiny("llama"), PrefixStore(), ids(60)
    with kvkeep.attach(model), torch.inference_mode():
        whole = kvkeep.Cache(model)
        model(prompt[:, :40], past_key_values=whole)
        store.learn(model, prompt[0, :40], whole)
        hit = store.prefill(model, prompt[0, :41])
        assert hit.shared_bytes == hit.live_bytes == whole.live_bytes
        for start, stop in ((40, 41), (41, 55), (55, 60)):
            part = prompt[:, start:stop]
            expected = model(part, past_key_values=whole).logits
            assert model(part, past_key_values=hit).logits.equal(expected)


def test_windows():
    """Layers with windows are served after tokens have left them, too."""
    model, store = tiny("mistral"), PrefixStore()
    with kvkeep.attach(model, store=store):
        short, long = ids(6), ids(40)
        for prompt in (short, long):
            expected = model.generate(prompt, past_key_values=kvkeep.Cache(model), **OPTIONS)
            for _ in range(2):
                assert model.generate(prompt, **OPTIONS).equal(expected)
    assert store.stats().hit_tokens == 5 + 6 + 39  # the long prompt begins like the short one


def test_another_process_finds_it_on_disk(tmp_path):
    prompt, model = ids(40), tiny("llama")
    for known in (0, 39):
        store = PrefixStore(backend=Disk(tmp_path / "store"), block=16)
        with kvkeep.attach(model, store=store):
            text = model.generate(prompt, **OPTIONS)
        assert store.stats().hit_tokens == known
        assert text.equal(model.generate(prompt, **OPTIONS))


def test_bad_input():
    model, store = tiny("llama"), PrefixStore()
    with pytest.raises(ShapeError, match="without tokens"):
        store.prefill(model, torch.zeros(0, dtype=torch.int64))
    for spec in ("h2o:8", "adakv(h2o:8)"):
        with pytest.raises(UnsupportedError, match=r"call kvkeep\.attach"):
            store.prefill(model, ids(9), spec=spec)
    assert store.prefill(model, ids(1)).fed == 0
    assert store.nbytes == 0


def test_drafting_passes_the_store_by():
    """Unless the call gives a cache that the store has filled."""
    model, store = tiny("llama"), PrefixStore()
    prompt = torch.cat([ids(12)] * 2, dim=1)
    wanted = model.generate(prompt, **OPTIONS)
    kvkeep.attach(model, store=store)
    draft = tiny("llama")
    for _ in range(2):
        assert model.generate(prompt, prompt_lookup_num_tokens=3, **OPTIONS).equal(wanted)
        assert model.generate(prompt, assistant_model=draft, **OPTIONS).equal(wanted)
        model.generation_config.prompt_lookup_num_tokens = 3
        assert model.generate(prompt, **OPTIONS).equal(wanted)
        model.generation_config.prompt_lookup_num_tokens = None
        assert model.generate(prompt, **OPTIONS).equal(wanted)
    assert store.stats().hits == 1
    cache = store.prefill(model, prompt)  # which is given, so it is used
    options = OPTIONS | {"past_key_values": cache, "prompt_lookup_num_tokens": 3}
    assert model.generate(prompt, **options).equal(wanted)
