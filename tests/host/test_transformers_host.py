"""What the host for transformers answers, beside transformers' own forward."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support.tiny_models import tiny

from kvkeep.hf.host import TransformersHost
from kvkeep.host import host_of

pytestmark = pytest.mark.usefixtures("without_gradients")


def ids(n, seed=0):
    return torch.randint(2, 80, (1, n), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("attached", [False, True])
def test_forward_through_a_cache(attached):
    model = tiny("llama")
    host = host_of(model)
    expected = model(ids(9), use_cache=False).logits
    if attached:
        host.attach("keep_all")
    assert host.attached is attached
    cache = host.new_cache()
    host.feed(ids(9)[:, :6], cache)
    logits = host.forward(ids(9)[:, 6:], cache, last=2)
    torch.testing.assert_close(logits, expected[:, -2:], atol=1e-5, rtol=1e-4)


def test_logits_of_a_model_that_gives_all_of_them(monkeypatch):
    model = tiny("llama")
    forward = type(model).forward

    def without_option(self, input_ids, past_key_values=None, use_cache=None):
        return forward(self, input_ids, past_key_values=past_key_values, use_cache=use_cache)

    monkeypatch.setattr(type(model), "forward", without_option)
    host = host_of(model)
    logits = host.forward(ids(5), host.new_cache(), last=2)
    assert logits.shape == (1, 2, host.vocabulary)


def test_adapters_belong_to_the_host():
    model = tiny("llama")
    plain = host_of(model).fingerprint()
    config = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    adapted = get_peft_model(model, config)
    host = host_of(adapted)
    assert type(host) is TransformersHost
    found = host.fingerprint()
    assert [part for part in plain if plain[part] != found[part]] == ["adapter"]
    host.attach()
    cache = host.new_cache()
    logits = host.forward(ids(4), cache)
    assert cache.routed
    host.detach()
    torch.testing.assert_close(logits, adapted(ids(4)).logits[:, -1:], atol=1e-5, rtol=1e-4)
