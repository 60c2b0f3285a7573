"""On the real model and real text: LoRA gradients in float32 through a cache that evicts."""

from __future__ import annotations

import copy

import pytest
import torch
from kvkeep_lab.bench.text import tokens_of_text
from peft import LoraConfig, get_peft_model
from support.autograd_gradients import error, gradients, unrolled

from kvkeep.train import backward


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["keep_all", "h2o:64+int8"])
def test_equals_plain_autograd(smollm2, spec):
    model, tokenizer = smollm2
    torch.manual_seed(0)
    model = get_peft_model(copy.deepcopy(model), LoraConfig(r=4, target_modules="all-linear"))
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            weight.data.normal_(0, 0.01)
    ids = tokens_of_text(tokenizer, 200)
    decisions: list = []
    found = backward(model, ids, ids, cache=spec, chunk=64, decisions=decisions)
    ours = gradients(model)
    expected = unrolled(model, ids, ids, spec, 64, None, decisions)
    expected.backward()
    torch.testing.assert_close(found, expected.detach(), rtol=1e-5, atol=0)
    assert error(ours, gradients(model)) < 1e-5
    evicted = [sum(x.shape[2] for x in calls) for calls in decisions]
    assert set(evicted) == {0 if spec == "keep_all" else 200 - 64}
