"""Models whose attention cannot run in kvkeep: they keep their own, if a rehearsal shows that it is
right with a cache; the others are refused by attach, or by their first forward."""

from __future__ import annotations

import re
from contextlib import nullcontext

import pytest
import torch
import transformers as tf
from support.odd_attention import FAULTS, KEEPS_ITS_OWN, OddModel, odd, with_odd_attention
from support.tiny_models import config, tiny

import kvkeep
from kvkeep.errors import UnsupportedError
from kvkeep.hf.config import decoder_of
from kvkeep.hf.forward.rehearsal import rehearse
from kvkeep.train import backward

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 96,
}
NO_INTERFACE = "does not go through transformers' AttentionInterface"
OTHERS = "its results with a cache differ from its results without a cache"
REFUSED = {
    "Moshi": f"masks a window of None tokens, but its config says 3000, and .* {OTHERS}",
    "XLMWithLMHeadModel": f"{NO_INTERFACE}, and with its own attention",
}


def ids(n: int = 6) -> torch.Tensor:
    return torch.randint(2, 96, (1, n), generator=torch.Generator().manual_seed(3))


def untrained(family: str) -> tf.PreTrainedModel:
    torch.manual_seed(0)
    head = family if family.endswith("HeadModel") else f"{family}ForCausalLM"
    return getattr(tf, head)(getattr(tf, f"{family.partition('With')[0]}Config")(**SMALL)).eval()


@pytest.mark.parametrize("family", REFUSED)
def test_what_attach_refuses_by_a_rehearsal(family):
    with torch.device("meta"):
        model = untrained(family)
    before, drawn = set(model.__dict__), torch.get_rng_state()
    implementation = model.config._attn_implementation
    for _ in range(2):
        with pytest.raises(UnsupportedError, match=f"{family}.*: .*{REFUSED[family]}.*; "):
            kvkeep.attach(model)
    assert set(model.__dict__) == before
    assert model.config._attn_implementation == implementation
    assert not decoder_of(model)._forward_hooks
    assert torch.get_rng_state().equal(drawn)


@torch.no_grad()
@pytest.mark.parametrize("fault", sorted(KEEPS_ITS_OWN))
def test_a_model_that_keeps_its_own_attention(fault):
    model = odd(fault)
    expected = model(ids(), use_cache=False).logits
    implementation = model.config._attn_implementation
    with pytest.raises(UnsupportedError, match=f"window:4.*{FAULTS[fault]}.*use keep_all"):
        kvkeep.attach(model, "window:4")
    assert not decoder_of(model)._forward_hooks
    with kvkeep.attach(model, "keep_all@fixed:16") as attachment:
        assert (attachment.layers, attachment.attention) == (2, 0)
        assert f"its own attention ({attachment.own})" in str(attachment)
        assert FAULTS[fault] in attachment.own
        assert model.config._attn_implementation == implementation
        cache = model(ids()[:, :4]).past_key_values
        assert str(cache.specs[0]) == "keep_all+plain@fixed:16"
        chunk = model(ids()[:, 4:], past_key_values=cache).logits
        torch.testing.assert_close(chunk, expected[:, 4:], atol=1e-5, rtol=1e-4)
        window = kvkeep.Cache(model, "window:4")
        with pytest.raises(UnsupportedError, match=r"window:4.*use keep_all"):
            model(ids()[:, :1], past_key_values=window)
        assert not window.fed


@torch.no_grad()
@pytest.mark.parametrize("window", [None, 3])
def test_a_sliding_window_that_the_model_masks_itself(window):
    """Doge asks for a mask of its own. A rehearsal on windows of two tokens shows that it is right,
    and Moshi's not."""
    torch.manual_seed(0)
    model = tf.DogeForCausalLM(tf.DogeConfig(**SMALL, sliding_window=window)).eval()
    expected = model(ids(9), use_cache=False).logits
    with kvkeep.attach(model):
        cache = kvkeep.Cache(model)
        chunks = [model(x, past_key_values=cache).logits for x in ids(9).split([5, 1, 3], dim=1)]
    torch.testing.assert_close(torch.cat(chunks, dim=1), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("fault", ["none", *FAULTS])
def test_a_model_of_unknown_code(fault):
    model = OddModel(config("llama", fault=fault)).eval()
    calls = []
    model.layers[0].register_forward_hook(lambda *_: calls.append(1))
    if fault == "none":
        assert kvkeep.attach(model).attention == 2
    elif fault in KEEPS_ITS_OWN:
        attachment = kvkeep.attach(model)
        assert not attachment.attention
        assert re.search(FAULTS[fault], attachment.own)
        kvkeep.detach(model)
    else:
        with pytest.raises(UnsupportedError, match=f"OddModel: .*({FAULTS[fault]})"):
            kvkeep.attach(model)
        assert not model.config._attn_implementation.startswith("kvkeep")
    assert not calls


@torch.no_grad()
@pytest.mark.parametrize("fault", FAULTS)
def test_what_no_rehearsal_sees_is_refused_by_the_first_forward(fault):
    model = tiny("llama")
    with kvkeep.attach(model):
        with_odd_attention(model.model, fault)
        with pytest.raises(UnsupportedError, match=FAULTS[fault]):
            model(ids(), past_key_values=kvkeep.Cache(model))


class Particular(tf.LlamaModel):
    """A decoder that its config alone does not build."""

    def __init__(self, config, more):
        super().__init__(config)


def test_a_decoder_that_cannot_be_built_again_is_attached():
    model = Particular(config("llama"), 1).eval()
    assert rehearse(model, "sdpa") is None
    with kvkeep.attach(model), torch.no_grad():
        out = model(ids(), past_key_values=kvkeep.Cache(model)).last_hidden_state
    torch.testing.assert_close(out, model(ids()).last_hidden_state, atol=2e-5, rtol=2e-4)


class NeedsWeights(tf.LlamaModel):
    """A decoder whose forward fails where its weights are not what they were."""

    def forward(self, *args, **kwargs):
        if float(self.embed_tokens.weight.std()) == 0:
            raise ValueError("no weights")
        return super().forward(*args, **kwargs)


def test_a_failure_that_is_not_the_cache_s_does_not_count():
    model = NeedsWeights(config("llama")).eval()
    assert rehearse(model, "sdpa") is None
    kvkeep.attach(model)


def test_a_changed_config_is_rehearsed_again():
    model = OddModel(config("llama", fault="none")).eval()
    with kvkeep.attach(model):
        pass
    model.config.fault = "again"
    with pytest.raises(UnsupportedError, match="more than once"):
        kvkeep.attach(model)


@pytest.mark.parametrize("family", ["mixtral", "qwen3-moe", "gpt-oss", "gemma3", "deepseek-v3"])
def test_the_rehearsal_reaches_its_end(family):
    """Experts are chosen by what is computed, and latent attention is the model's own."""
    model = tiny(family)
    attachment = kvkeep.attach(model)
    name = model.config._attn_implementation if attachment.attention else None
    kvkeep.detach(model)
    assert rehearse(decoder_of(model), name) == ""


@pytest.mark.parametrize("attached", [False, True])
def test_gradients_through_a_model_that_keeps_its_own_attention(attached):
    model = odd("values")
    calls = []
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    with kvkeep.attach(model) if attached else nullcontext():
        with pytest.raises(UnsupportedError, match="its attention changes its values"):
            backward(model, ids(), ids())
        with pytest.raises(UnsupportedError, match="its attention changes its values"):
            kvkeep.export(model)
        assert bool(decoder_of(model)._forward_hooks) == attached
    assert not calls
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("fault", FAULTS)
def test_gradients_of_what_no_rehearsal_sees(fault):
    model = tiny("llama")
    with kvkeep.attach(model):
        with_odd_attention(model.model, fault)
        with pytest.raises(UnsupportedError, match=f"{FAULTS[fault]}|does not attend once"):
            backward(model, ids(), ids(), chunk=2)
    assert all(p.grad is None for p in model.parameters())


class Infinite(tf.LlamaModel):
    """A decoder whose keys are no numbers where its weights are not its own."""

    def __init__(self, config):
        super().__init__(config)
        for layer in self.layers:
            layer.input_layernorm.variance_epsilon = float("nan")


def test_what_is_no_number_is_not_taken_for_changed():
    assert kvkeep.attach(Infinite(config("llama"))).attention == 2
