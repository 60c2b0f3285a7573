"""Forwards that kvkeep refuses: the error names the reason, and the next forward works."""

from __future__ import annotations

import pytest
import torch
from support.odd_attention import odd
from support.tiny_models import tiny

import kvkeep
from kvkeep.errors import SpecError, StateError, UnsupportedError

IDS = torch.randint(3, 90, (1, 12), generator=torch.Generator().manual_seed(5))


def logits(model, cache, a, b, **given):
    with torch.no_grad():
        return model(IDS[:, a:b], past_key_values=cache, **given).logits


def lower_triangle(n, columns):
    shown = torch.ones(n, columns, dtype=torch.bool).tril(columns - n)
    return torch.where(shown, 0.0, torch.finfo(torch.float32).min)[None, None]


@pytest.mark.parametrize("family", ["llama", "gemma3", "deepseek-v3", "gemma4"])
@pytest.mark.parametrize("fed", [0, 5])
def test_a_mask_of_four_axes_changes_nothing(family, fed):
    model = tiny(family)
    mask = lower_triangle(6 - fed, 6)
    if family.startswith("gemma"):  # one for each type of layer
        mask = dict.fromkeys(("full_attention", "sliding_attention"), mask)
    with kvkeep.attach(model):
        plain, cache = kvkeep.Cache(model), kvkeep.Cache(model)
        if fed:
            for one in (plain, cache):
                logits(model, one, 0, fed)
        with pytest.raises(UnsupportedError, match=r"of four axes for .*; give a mask"):
            logits(model, cache, fed, 6, attention_mask=mask)
        assert cache.fed == fed
        assert logits(model, cache, fed, 12).equal(logits(model, plain, fed, 12))


def test_a_forward_after_one_that_attention_refused():
    model = tiny("llama")
    with kvkeep.attach(model):
        plain, cache = kvkeep.Cache(model), kvkeep.Cache(model)
        with pytest.raises(UnsupportedError, match="attend to later tokens"):
            logits(model, cache, 0, 6, is_causal=False)
        assert logits(model, cache, 0, 12).equal(logits(model, plain, 0, 12))


def test_a_mask_of_four_axes_of_a_model_with_its_own_attention():
    model = odd()
    with kvkeep.attach(model) as attachment:
        assert attachment.own
        logits(model, kvkeep.Cache(model), 0, 6)


def test_gradient_checkpointing_in_training():
    model = tiny("llama")
    model.gradient_checkpointing_enable()
    model.train()
    kvkeep.attach(model)
    cache = kvkeep.Cache(model, "keep_all@concat")
    with pytest.raises(UnsupportedError, match="gradient checkpointing of LlamaModel in training"):
        model(IDS, past_key_values=cache)
    assert cache.fed == 0
    model(IDS, labels=IDS).loss.backward()  # without a cache it is as before
    model.gradient_checkpointing_disable()
    model(IDS, past_key_values=cache).logits.sum().backward()
    assert cache.fed == 12


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_gradient_checkpointing_in_training_without_gradients(family):
    """GPT-2's own code takes the cache from its layers."""
    model = tiny(family)
    expected = model.eval().generate(IDS, max_new_tokens=4, do_sample=False)
    for part in model.modules():
        part.p = 0.0  # of dropout
    model.train()
    model.gradient_checkpointing_enable()
    kvkeep.attach(model)
    assert model.generate(IDS, max_new_tokens=4, do_sample=False).equal(expected)
    assert model.is_gradient_checkpointing
    layers = model.model.layers if family == "llama" else model.transformer.h
    hook = layers[-1].register_forward_hook(lambda *_: 1 / 0)
    with torch.no_grad(), pytest.raises(ZeroDivisionError):
        model(IDS, past_key_values=kvkeep.Cache(model))
    hook.remove()
    model(IDS, labels=IDS).loss.backward()
    assert model.is_gradient_checkpointing


def test_a_spec_in_the_place_of_a_cache():
    model = tiny("llama")
    with kvkeep.attach(model):
        for call in (model, model.generate):
            with pytest.raises(SpecError, match=r"give kvkeep.Cache\(model, 'h2o:8'\)"):
                call(IDS, cache="h2o:8")


def test_a_second_detach():
    model = tiny("llama")
    kvkeep.attach(model)
    kvkeep.detach(model)
    with pytest.raises(StateError, match="not attached, so there is nothing to detach") as raised:
        kvkeep.detach(model)
    assert "kvkeep.attach" not in str(raised.value)


def test_an_early_exit_that_fails_leaves_the_config():
    model = tiny("llama", num_hidden_layers=3)
    with kvkeep.attach(model, ["keep_all", "keep_all+int8", "keep_all"]):
        with pytest.raises(SpecError, match="3 specs"):
            model.generate(IDS, max_new_tokens=4, do_sample=False, assistant_early_exit=1)
        assert model.config.num_hidden_layers == 3
        assert model.generate(IDS, max_new_tokens=4, do_sample=False).shape == (1, 16)
