"""Layers that reuse the keys and values of other layers read their slots, and see what they saw."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from support.random_ids import ids
from support.tiny_models import WINDOW, tiny
from transformers import DynamicCache

import kvkeep
from kvkeep.errors import ShapeError, StateError, UnsupportedError
from kvkeep.generate import SamplingParams, generate_many
from kvkeep.hf.steps.cuda_graph import Graphed
from kvkeep.host import host_of
from kvkeep.layer.layer import LayerCache
from kvkeep.layer.step import StepInputs
from kvkeep.spec import CacheSpec

pytestmark = pytest.mark.usefixtures("one_thread")

SPECS = ["h2o:10,recent=4", "window:12,sinks=2", "snapkv:10,window=4,pool=3", "adakv(h2o:10)"]
CHUNKS = [9, 1, 1, 14, 3, 1, 1]  # 30 in all
NEAR = {"atol": 5e-5, "rtol": 2e-4}


@pytest.fixture(scope="module", params=["gemma3n", "gemma4"])
def model(request):
    return tiny(request.param)


def kept(layer):
    """Which positions each head of a layer of one row keeps."""
    if not layer.fed:
        return [set() for _ in range(2)]
    return [{p for p in head if p >= 0} for head in layer.positions()[0].tolist()]


def mask_of(before, columns, n, window=None):
    """Additive (1, 4, n, columns) for the newest n tokens, whose two kv heads saw these."""
    seen = torch.zeros(2, n, columns, dtype=torch.bool)
    for head, held in enumerate(before):
        for i in range(n):
            now = columns - n + i
            first = 0 if window is None else now - window + 1
            reached = [p for p in (*held, *range(columns - n, now + 1)) if p >= first]
            seen[head, i, reached] = True
    mask = torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, -torch.inf)
    return mask.repeat_interleave(2, dim=0)[None]


OTHERS = ("fixed:24", "concat", "host")
IN_TURNS = [
    pytest.param(spec, storage, marks=() if (i - j) % 3 == 0 else pytest.mark.slow)
    for i, spec in enumerate(SPECS)
    for j, storage in enumerate(OTHERS)
]


@torch.no_grad()
@pytest.mark.parametrize(("spec", "storage"), [*((s, "growing") for s in SPECS), *IN_TURNS])
def test_all_layers_of_a_type_see_the_same_slots(model, spec, storage):
    """The oracle keeps every token, and is told in a mask which of them the layers of a type may
    see. Its layer 0 would see more: it must not count."""
    if storage == "fixed:24" and spec.startswith("adakv"):
        pytest.skip("heads of different lengths grow")
    model, window = deepcopy(model), model.config.sliding_window
    model.model.layers[0].self_attn.o_proj.weight.zero_()
    exact = deepcopy(model).double()
    exact.set_attn_implementation("eager")
    cache, whole = kvkeep.Cache(model, f"{spec}@{storage}"), DynamicCache()
    shrunk = False
    for part in ids().split(CHUNKS, dim=1):
        n, columns = part.shape[1], cache.fed + part.shape[1]
        _, sliding, full = (kept(layer) for layer in cache.layers)
        masks = {
            "sliding_attention": mask_of(sliding, columns, n, window),
            "full_attention": mask_of(full, columns, n),
        }
        if spec.startswith("window"):
            masks["full_attention"] = masks["full_attention"].masked_fill(
                ~within(12, 2, columns, n), -torch.inf
            )
        expected = exact(part, past_key_values=whole, attention_mask=masks).logits.float()
        with kvkeep.attach(model):
            found = model(part, past_key_values=cache).logits
        torch.testing.assert_close(found, expected, **NEAR)
        shrunk |= cache.layers[2].length < cache.fed
    assert shrunk
    assert [layer.cursor.readers for layer in cache.layers] == [0, 1, 2]


def within(size, sinks, columns, n):
    query = torch.arange(columns - n, columns)[:, None]
    key = torch.arange(columns)
    return (query - key < size) | (key < sinks)


@torch.no_grad()
@pytest.mark.parametrize("spec", ["keep_all+int8", "keep_all+kivi:2,together=4,sinks=2"])
def test_codes_are_read_as_the_unattached_model_reads_them(model, spec):
    specs = {"full_attention": spec, "sliding_attention": "keep_all+int8"}
    attached, plain = kvkeep.Cache(model, specs), kvkeep.Cache(model, specs)
    for part in ids(2).split(CHUNKS, dim=1):
        expected = model(part, past_key_values=plain).logits
        with kvkeep.attach(model):
            found = model(part, past_key_values=attached).logits
        torch.testing.assert_close(found, expected, atol=2e-3, rtol=2e-3)


@torch.no_grad()
@pytest.mark.parametrize("spec", ["keep_all", *SPECS])
def test_the_logits_that_are_asked_for_decide_nothing(model, spec):
    """Gemma 4 computes its last layers for these only."""
    prompt, pads = ids(3, 24), (12, 1, 0)
    mask = torch.ones_like(prompt)
    for row, count in enumerate(pads):
        mask[row, :count] = 0
    position = (mask.cumsum(dim=1) - 1).clamp(min=0)
    caches = [kvkeep.Cache(model, spec) for _ in range(3)]
    with kvkeep.attach(model):
        for asked, cache in zip((0, 1, 5), caches, strict=True):
            given = {"attention_mask": mask, "position_ids": position, "past_key_values": cache}
            found = model(prompt, logits_to_keep=asked, **given).logits[:, -1]
            if not asked:
                every = found
            torch.testing.assert_close(found, every, **NEAR)
        for row, count in enumerate(pads):
            alone = kvkeep.Cache(model, spec)
            own = model(prompt[row : row + 1, count:], past_key_values=alone).logits[0, -1]
            torch.testing.assert_close(own, every[row], **NEAR)
        for layers in zip(*(cache.layers for cache in caches), strict=True):
            first, *others = (layer.positions().sort(dim=2).values for layer in layers)
            assert all(first.equal(x) for x in others)
        assert spec != "keep_all" or len(caches[0].layers[2].slots.segments()) > 1, "not parted"


@pytest.mark.parametrize("spec", ["keep_all", "h2o:10,recent=4+int8"])
def test_saved_forked_and_restored(tmp_path, model, spec):
    with kvkeep.attach(model), torch.no_grad():
        cache = kvkeep.Cache(model, spec)
        model(ids(), past_key_values=cache)
        cache.save(tmp_path / "cache")
        taken = cache.snapshot()
        fork = cache.freeze().fork()
        more = ids(1, 6, seed=4)
        expected = model(more, past_key_values=cache).logits
        loaded = kvkeep.load(tmp_path / "cache", model)
        assert model(more, past_key_values=loaded).logits.equal(expected)
        assert model(more, past_key_values=fork).logits.equal(expected)
        cache.restore(taken)
        assert model(more, past_key_values=cache).logits.equal(expected)


@torch.no_grad()
@pytest.mark.parametrize(("spec", "back"), [("keep_all", 5), ("h2o:10,recent=4", 0)])
@pytest.mark.parametrize("n", [1, 2])
def test_a_forward_that_ends_between_the_readings(model, spec, back, n):
    def stop(*_):
        raise InterruptedError

    prompt, more = ids(1, 5), ids(1, n, seed=4)
    with kvkeep.attach(model):
        cache = kvkeep.Cache(model, spec)
        for part in prompt.split([3, 1, 1], dim=1):
            model(part, past_key_values=cache)
        hook = model.model.layers[5].register_forward_pre_hook(stop)
        with pytest.raises(InterruptedError):
            model(more, past_key_values=cache)
        hook.remove()
        assert {layer.fed for layer in cache.layers} == {5 + n}
        for refused in (
            lambda: model(more, past_key_values=cache),
            cache.snapshot,
            cache.freeze,
            lambda: cache.layers[2].step(*torch.zeros(3, 1, 2, 1, 8), scale=1.0),
        ):
            with pytest.raises(StateError, match="have not attended"):
                refused()
        if back:
            cache.rewind(back)
        else:
            cache.reset()
        found = model(torch.cat([prompt[:, back:], more], dim=1), past_key_values=cache).logits
    expected = model(torch.cat([prompt, more], dim=1), use_cache=False).logits
    torch.testing.assert_close(found, expected[:, back:], **NEAR)


@torch.no_grad()
def test_attention_weights_of_the_readers(model):
    model = deepcopy(model)
    model.set_attn_implementation("eager")
    expected = model(ids(), output_attentions=True, use_cache=False).attentions
    with kvkeep.attach(model):
        cache = kvkeep.Cache(model)
        found = model(ids(), output_attentions=True, past_key_values=cache).attentions
    assert len(found) == len(expected) == 6
    for own, other in zip(found, expected, strict=True):
        torch.testing.assert_close(own, other, atol=5e-6, rtol=1e-4)


def test_detached_it_is_as_before(model):
    before, text = dict(model.__dict__), model.generate(ids(), max_new_tokens=6, do_sample=False)
    kvkeep.attach(model)
    kvkeep.detach(model)
    assert model.__dict__ == before
    assert model.generate(ids(), max_new_tokens=6, do_sample=False).equal(text)


def test_a_batch_gives_the_texts_of_single_prompts(model):
    prompts = [ids(1, n, seed=n)[0] for n in (5, 12, 9)]
    params = SamplingParams(max_new_tokens=6)
    with kvkeep.attach(model):
        together = generate_many(model, prompts, params, progress=False)
        for prompt, (answer,) in zip(prompts, together, strict=True):
            text = model.generate(prompt[None], max_new_tokens=6, do_sample=False)
            assert answer.tokens == text[0, len(prompt) :].tolist()


def test_the_store_gives_what_reading_gives(model):
    store, prompt = kvkeep.PrefixStore(block=2), ids(1, WINDOW - 1)
    with kvkeep.attach(model, store=store):
        options = {"max_new_tokens": 5, "do_sample": False}
        first = model.generate(prompt, **options)
        assert model.generate(prompt, **options).equal(first)
    assert store.stats().hits == 1
    assert model.generate(prompt, **options).equal(first)


REUSED = "reuse the keys and values of other layers"


def test_what_has_no_reading_is_refused_before_anything_changes(model):
    with kvkeep.attach(model), torch.no_grad():
        cache = kvkeep.Cache(model, "keep_all@fixed:64")
        model(ids(), past_key_values=cache)
        with pytest.raises(UnsupportedError, match=f"{REUSED}, which a CUDA graph"):
            Graphed(model, cache)
        with pytest.raises(UnsupportedError, match=REUSED):
            cache.compress(model, ids(), "kvzip:50%")
        with pytest.raises(UnsupportedError, match="a draft model"):
            model(ids(1, 1), past_key_values=cache, return_shared_kv_states=True)
        assert not host_of(model).narrows
        assert model(ids(1, 1), past_key_values=cache).logits.isfinite().all()


# -- one layer ------------------------------------------------------------------------------


def layer_of(spec, readers):
    parsed = CacheSpec.parse(spec)
    return parsed.layer(window=WINDOW if "window" in spec else None, readers=readers)


def qkv(n, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(1, heads, n, 8, generator=generator) for heads in (4, 2, 2)]


@pytest.mark.parametrize(
    "spec",
    [
        *("h2o:6,recent=2", "tova:6", "keep_all", "window:6+int8"),
        *("keep_all+int4:recent=3,sinks=1", "window:6+int4", "h2o:6,recent=2+int4:recent=2"),
        "keep_all+kivi:4,together=4,recent=2,sinks=1",
    ],
)
def test_readings_decide_nothing_and_see_what_the_step_saw(spec):
    shared, alone = layer_of(spec, 2), layer_of(spec, 0)
    for seed, n in enumerate([9, 1, 1, 4, 1, 1, 1]):
        q, k, v = qkv(n, seed)
        expected = alone.step(q, k, v, scale=0.3)
        torch.testing.assert_close(shared.step(q, k, v, scale=0.3), expected)
        for _ in range(2):
            found = read(shared, q[:, :, -2:], k, v)
            torch.testing.assert_close(found, expected[:, :, -2:], atol=1e-6, rtol=1e-5)
        assert kept(shared) == kept(alone)


def read(layer, q, k, v):
    return layer.read(StepInputs(q, k, v, None, 0.3))


def test_a_reading_without_a_step_or_with_other_queries():
    layer: LayerCache = layer_of("keep_all", 1)
    q, k, v = qkv(3)
    with pytest.raises(StateError, match="feed that layer first"):
        read(layer, q, k, v)
    layer.step(q, k, v, scale=0.3)
    for wrong in (qkv(4)[0], q[:, :3], q.double()):
        with pytest.raises(ShapeError):
            read(layer, wrong, k, v)
    read(layer, q, k, v)
    with pytest.raises(StateError, match="feed that layer first"):
        read(layer, q, k, v)


def test_slots_move_after_the_last_reading_only():
    layer = layer_of("h2o:6,recent=2", 2)
    q, k, v = (x.repeat(2, 1, 1, 1) for x in qkv(9))
    position = torch.arange(9).repeat(2, 1)
    position[0] = (position[0] - 6).clamp(min=-1)
    layer.step(q, k, v, position, scale=0.3)
    read(layer, q, k, v)
    assert len(layer.slots.segments()) == 1
    assert layer.length == 9
    read(layer, q, k, v)
    assert [int((x >= 0).sum()) for x in layer.positions()[:, 0]] == [3, 6]
    assert len(layer.slots.segments()) == 2, "rows of different lengths were not parted"


def test_a_layer_that_expects_no_readings_any_more_keeps_its_budget():
    layer = layer_of("h2o:6,recent=2", 2)
    layer.step(*qkv(9), scale=0.3)
    layer.crop(0)
    assert layer.length == 6
    with pytest.raises(StateError, match="feed that layer first"):
        read(layer, *qkv(9))
    layer.step(*qkv(1), scale=0.3)
