"""Forwards that kvkeep refuses: the error names the reason, and the next forward works."""

from __future__ import annotations

import pytest
import torch
from peft import PrefixTuningConfig, PromptTuningConfig, get_peft_model
from support.sweep_configs import model_of
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
        with pytest.raises(UnsupportedError, match="attend to later ones"):
            logits(model, cache, 0, 6, is_causal=False)
        assert logits(model, cache, 0, 12).equal(logits(model, plain, 0, 12))


def test_a_mask_of_four_axes_of_a_model_with_its_own_attention():
    model = model_of("doge")
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


# -- prompts that PEFT learned ------------------------------------------------------------------

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
    """The store keeps nothing: token ids do not identify such a prompt."""
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
