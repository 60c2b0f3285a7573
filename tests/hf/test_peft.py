"""PEFT's methods that prepare or wrap the cache of `generate()`, which LoRA does not."""

from __future__ import annotations

import pytest
import torch
from peft import PrefixTuningConfig, PromptTuningConfig, ShadowConfig, get_peft_model
from support.tiny_models import tiny

import kvkeep

IDS = torch.randint(3, 90, (1, 12), generator=torch.Generator().manual_seed(5))

VIRTUAL = 3


def learned(family, config, **options):
    torch.manual_seed(1)
    options |= {"task_type": "CAUSAL_LM", "num_virtual_tokens": VIRTUAL}
    return get_peft_model(tiny(family), config(**options)).eval()


def without_cache(tuned, ids, mask, new=5):
    """The greedy answer of forwards that cache nothing."""
    for _ in range(new):
        with torch.no_grad():
            token = tuned(input_ids=ids, attention_mask=mask).logits[:, -1:].argmax(-1)
        ids, mask = torch.cat([ids, token], dim=1), torch.cat([mask, token > -1], dim=1)
    return ids


def batch():
    ids = torch.cat([IDS, IDS.flip(1)])
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    return ids, mask


@pytest.mark.parametrize("config", [PrefixTuningConfig, PromptTuningConfig])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_learned_prompts(family, config):
    """The store learns nothing, because token ids do not tell what PEFT puts before them."""
    tuned = learned(family, config)
    model, (ids, mask) = tuned.get_base_model(), batch()
    greedy = {"max_new_tokens": 5, "do_sample": False}
    wanted, store = without_cache(tuned, ids[1:], mask[1:]), kvkeep.PrefixStore()
    kvkeep.attach(tuned, store=store)
    for _ in range(2):
        assert tuned.generate(input_ids=ids[1:], **greedy).equal(wanted)
    cache = kvkeep.Cache(model, "keep_all@fixed", capacity=32)
    rows = {"input_ids": ids, "attention_mask": mask, "past_key_values": cache}
    assert tuned.generate(**rows, **greedy)[1:].equal(wanted)
    assert cache.fed == VIRTUAL + ids.shape[1] + 4
    assert store.stats().entries == 0


def test_a_learned_prefix_counts_for_a_budget():
    tuned = learned("llama", PrefixTuningConfig)
    with kvkeep.attach(tuned, "window:8,sinks=3"):
        cache = kvkeep.Cache(tuned.get_base_model(), "window:8,sinks=3")
        tuned.generate(input_ids=IDS, past_key_values=cache, max_new_tokens=5, do_sample=False)
    (held, _, _), *_ = cache
    with torch.no_grad():
        (learned_keys, _, _), *_ = tuned.get_prompt(1)
    assert cache.layers[0].length == 11
    assert held[:, :, :3].equal(learned_keys)


def test_prompt_tuning_of_padded_rows_in_a_window():
    """PEFT puts its prompt before the padding, which transformers counts in its window."""
    tuned = learned("gemma3", PromptTuningConfig)
    ids, mask = batch()
    with torch.no_grad():
        wanted = tuned(input_ids=ids, attention_mask=mask, use_cache=False).logits
        kvkeep.attach(tuned)
        found = tuned(input_ids=ids, attention_mask=mask)
    assert found.past_key_values.fed == VIRTUAL + ids.shape[1]
    real = mask.bool()
    each = (x[:, VIRTUAL:][real] for x in (found.logits, wanted))
    torch.testing.assert_close(*each, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("attached_first", [True, False])
def test_a_cache_that_peft_pairs_with_its_own(attached_first):
    model = tiny("llama")
    if attached_first:
        kvkeep.attach(model)
    torch.manual_seed(1)
    tuned = get_peft_model(model, ShadowConfig(task_type="CAUSAL_LM", init_weights=False)).eval()
    if not attached_first:
        kvkeep.attach(tuned)
    cache = kvkeep.Cache(model)
    found = tuned.generate(input_ids=IDS, past_key_values=cache, max_new_tokens=6, do_sample=False)
    assert found.equal(without_cache(tuned, IDS, torch.ones_like(IDS), 6))
    assert cache.fed == 17
