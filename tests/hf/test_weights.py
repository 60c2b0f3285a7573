"""Attention weights of attached models, and dropout on them, as in the model's own attention."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from support.slow import every
from support.tiny_models import tiny
from transformers import CompileConfig

import kvkeep
from kvkeep.attention import Held
from kvkeep.errors import UnsupportedError
from kvkeep.hf.forward.weights import Explicit

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPT, NEW = 14, 12
OPTIONS = {"max_new_tokens": NEW, "do_sample": False, "return_dict_in_generate": True}
# A plain one, a window, a cap and a window, sinks; one that does not tell its attention modules.
FAMILIES = ["llama", "mistral", "gemma2", "gpt-oss", "gpt2"]


def ids(rows=2, n=PROMPT):
    return torch.randint(2, 96, (rows, n), generator=torch.Generator().manual_seed(3))


def padded(rows=2, n=PROMPT, pads=4):
    mask = torch.ones(rows, n, dtype=torch.long)
    mask[0, :pads] = 0
    return mask


def eager(family, **options):
    model = tiny(family, **options)
    model.set_attn_implementation("eager")
    return model


def assert_same_weights(found, expected, pads=0):
    """Steps of layers of (B, Hq, n, T); the first row's `pads` padding queries see nothing."""
    assert len(found) == len(expected)
    for step, other in zip(found, expected, strict=True):
        assert len(step) == len(other) > 0
        for x, y in zip(step, other, strict=True):
            assert x.shape == y.shape
            if pads and x.shape[2] == PROMPT:
                assert not x[0, :, :pads].any()
                x, y = x[:, :, pads:], y[:, :, pads:]
            torch.testing.assert_close(x, y, atol=5e-6, rtol=1e-4)


@pytest.mark.parametrize(
    ("given", "family"),
    every(
        2,
        product([{}, {"attention_mask": padded()}, {"prefill_chunk_size": 5}], FAMILIES),
    ),
)
def test_weights_in_generation(family, given):
    model = eager(family)
    options = {**OPTIONS, "output_attentions": True, **given}
    expected = model.generate(ids(), **options)
    with kvkeep.attach(model):
        found = model.generate(ids(), **options)
    assert isinstance(found.past_key_values, kvkeep.Cache)
    assert found.sequences.equal(expected.sequences)
    pads = 4 if "attention_mask" in given else 0
    assert_same_weights(found.attentions, expected.attentions, pads)


@torch.no_grad()
def test_a_forward_without_a_cache_gets_kvkeeps():
    """Also where the model's own attention, torch's, would give no weights."""
    plain = eager("llama")(ids(), output_attentions=True).attentions
    model = tiny("llama")
    with kvkeep.attach(model):
        output = model(ids(), output_attentions=True)
        assert isinstance(output.past_key_values, kvkeep.Cache)
        assert_same_weights([output.attentions], [plain])
        assert model(ids()).attentions is None


@torch.no_grad()
def test_weights_by_the_config():
    model = eager("llama")
    model.config.output_attentions = True
    expected = model(ids()).attentions
    with kvkeep.attach(model):
        cache = kvkeep.Cache(model)
        assert_same_weights([model(ids(), past_key_values=cache).attentions], [expected])


@pytest.mark.parametrize("spec", ["keep_all+int8@fixed:64", "keep_all+kivi", "window:64", "h2o:32"])
def test_weights_of_other_caches_that_hold_all(spec):
    model = tiny("llama")
    with kvkeep.attach(model, spec):
        expected = model.generate(ids(), **OPTIONS)
        found = model.generate(ids(), output_attentions=True, **OPTIONS)
    assert found.sequences.equal(expected.sequences)
    lengths = [PROMPT + i for i in range(NEW)]
    assert [step[0].shape[3] for step in found.attentions] == lengths
    for step in found.attentions:
        torch.testing.assert_close(step[0].sum(dim=-1), torch.ones(step[0].shape[:3]))


@pytest.mark.parametrize("spec", ["h2o:8", ["keep_all", "h2o:8"], "window:8", "adakv(h2o:8)"])
def test_weights_of_tokens_that_are_gone(spec):
    model = tiny("llama")
    with kvkeep.attach(model, spec), torch.no_grad():
        cache = kvkeep.Cache(model, spec)
        model(ids(), past_key_values=cache)
        before = cache.stats()
        with pytest.raises(UnsupportedError, match="output_attentions asks for weights over all"):
            model(ids(n=1), past_key_values=cache, output_attentions=True)
        assert cache.stats() == before
        model(ids(n=1), past_key_values=cache)
        given = kvkeep.Cache(model, spec)
        for options in ({}, {"past_key_values": given}):
            with pytest.raises(UnsupportedError, match="of 24 tokens"):
                model.generate(ids(), output_attentions=True, **OPTIONS, **options)
        assert given.fed == 0


def test_weights_in_a_graph():
    model = tiny("llama")
    torch._dynamo.reset()
    with kvkeep.attach(model), torch.no_grad():
        cache = kvkeep.Cache(model)
        model(ids(), past_key_values=cache)
        step = torch.compile(model.forward, backend="eager", fullgraph=True)
        with pytest.raises(Exception, match="call the model uncompiled"):
            step(ids(n=1), past_key_values=cache, output_attentions=True)
        assert cache.fed == PROMPT
    torch._dynamo.reset()


@pytest.mark.parametrize("training", [True, False])
def test_generate_does_not_compile_steps_that_are_written_out(training):
    model = tiny("llama", attention_dropout=0.3).train(training)
    compiled = CompileConfig(fullgraph=True, backend="eager", mode=None)
    compiled._compile_all_devices = True  # by itself it compiles on accelerators only
    options = {**OPTIONS, "output_attentions": not training}
    with kvkeep.attach(model, "keep_all@fixed"):
        runs = []
        for asked in ({}, {"compile_config": compiled}):
            torch.manual_seed(3)
            runs.append(model.generate(ids(), **options, **asked))
        assert runs[0].sequences.equal(runs[1].sequences)
        model.eval()
        cache = runs[1].past_key_values
        assert not cache.is_compileable
        cache.reset()
        model.generate(ids(), past_key_values=cache, **OPTIONS)
        assert cache.is_compileable


DROPOUT = {"gpt2": {"attn_pdrop": 0.3}}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("given", [{}, {"attention_mask": padded()}])
def test_dropout_drops_what_the_model_would(family, given):
    """Generation in training mode, as trainers of policies do: the same seed, the same text."""
    model = tiny(family, **DROPOUT.get(family, {"attention_dropout": 0.3})).train()
    options = {**OPTIONS, "output_logits": True, **given}
    runs = []
    for seed, attached in ((3, False), (3, True), (4, True)):
        if attached:
            kvkeep.attach(model)
        torch.manual_seed(seed)
        runs.append(model.generate(ids(), **options))
        if attached:
            kvkeep.detach(model)
    plain, found, other = runs
    assert isinstance(found.past_key_values, kvkeep.Cache)
    assert found.sequences.equal(plain.sequences)
    for x, y in zip(found.logits, plain.logits, strict=True):
        torch.testing.assert_close(x, y, atol=5e-5, rtol=1e-3)
    assert (other.logits[0] - plain.logits[0]).abs().max() > 0.1


def test_dropout_and_gradients():
    model = tiny("llama", attention_dropout=0.3).train()
    grads = []
    for attached in (False, True):
        if attached:
            kvkeep.attach(model)
        cache = kvkeep.Cache(model, "keep_all@concat") if attached else None
        torch.manual_seed(3)
        model.zero_grad()
        model(ids(), labels=ids(), past_key_values=cache).loss.backward()
        grads.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    for x, y in zip(*grads, strict=True):
        torch.testing.assert_close(x, y, atol=1e-5, rtol=1e-3)


SPECS = ["keep_all", "window:6,sinks=2", "h2o:8", "tova:8", "snapkv:8,window=4", "adakv(h2o:8)"]


@pytest.mark.parametrize("spec", [*SPECS, "keep_all+kivi", "h2o:8+int8@fixed"])
def test_a_step_that_is_written_out(spec):
    """It attends to, and leaves, what any step does, whatever the policy looks at."""
    layers = [kvkeep.CacheSpec.parse(spec).layer(capacity=64) for _ in range(2)]
    random = torch.Generator().manual_seed(1)
    for n in (20, 1, 1, 7, 1):
        q, k, v = (
            torch.randn(2, heads, n, 32, generator=random, dtype=torch.float32)
            for heads in (4, 2, 2)
        )
        for layer, attend in zip(layers, (None, Explicit(layers[1], 0.0)), strict=True):
            layer.out = layer.step(q, k, v, scale=0.2, attend=attend)
        torch.testing.assert_close(layers[0].out, layers[1].out, atol=2e-4, rtol=1e-3)
        assert layers[0].positions().equal(layers[1].positions())
        held: list[Held] = [layer.held() for layer in layers]
        assert held[0].keys.equal(held[1].keys)


def test_weights_stand_at_the_columns_that_were_fed():
    """Though every row is padded, and one far more than the others."""
    model = tiny("llama")
    mask = torch.ones(3, 16, dtype=torch.int64)
    mask[0, :3], mask[1, :12], mask[2, :5] = 0, 0, 0
    given = torch.randint(2, 96, (3, 16), generator=torch.Generator().manual_seed(1))
    options = {**OPTIONS, "attention_mask": mask, "output_attentions": True}
    with kvkeep.attach(model):
        found = model.generate(given, **options)
    model.set_attn_implementation("eager")
    expected = model.generate(given, **options)
    assert found.sequences.equal(expected.sequences)
    for step, (mine, other) in enumerate(zip(found.attentions, expected.attentions, strict=True)):
        for x, y in zip(mine, other, strict=True):
            real = mask[:, None, :, None].bool() if not step else torch.ones(1, dtype=torch.bool)
            torch.testing.assert_close(x * real, y * real, atol=1e-5, rtol=1e-4)
