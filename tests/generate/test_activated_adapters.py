"""Batch, with an adapter that computes from its invocation in each prompt on."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support.tiny_models import tiny

import kvkeep
from kvkeep.generate import Batch, SamplingParams
from kvkeep.host import host_of
from kvkeep.host.cache import bytes_of

INVOCATION = [90, 91, 92]


@pytest.mark.parametrize("stored", [False, True])
def test_each_prompt_is_the_adapters_from_its_invocation_on(stored):
    torch.manual_seed(0)
    config = LoraConfig(
        task_type="CAUSAL_LM",
        target_modules=["q_proj", "v_proj"],
        alora_invocation_tokens=INVOCATION,
        init_lora_weights=False,
    )
    tuned = get_peft_model(tiny("llama"), config).eval()
    prompts = [[*range(3, 13), *INVOCATION, 7], [*range(3, 20)], [*INVOCATION, 8, 9]]
    expected = [
        tuned.generate(input_ids=torch.tensor([ids]), max_new_tokens=5, do_sample=False)
        for ids in prompts
    ]
    kvkeep.attach(tuned)
    host = host_of(tuned)
    most = bytes_of(host.new_cache(), host.geometries(), 50)
    batch = Batch(tuned, max_bytes=most, store=kvkeep.PrefixStore() if stored else None)
    for again in (False, True):
        answers = [batch.add(ids, SamplingParams(5))[0] for ids in prompts]
        (several, _) = batch.add(prompts[0], SamplingParams(5), n=2)
        for _ in range(2):
            batch.step()
        batch.add([5, 6], SamplingParams(30, priority=1))  # preempts another
        batch.step()
        assert any(answer.preempted is not None for answer in answers)
        list(batch)
        for answer, whole in zip([*answers, several], [*expected, expected[0]], strict=True):
            assert answer.ids.tolist() == whole[0].tolist()
        assert [answer.cached for answer in answers] == (
            [13, 16, 4] if stored and again else [0, 0, 0]
        )
