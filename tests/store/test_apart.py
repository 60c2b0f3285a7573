"""What must never be found: slots that another computation gave."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support.tiny_models import growing_rope, tiny
from transformers import GenerationConfig

import kvkeep
from kvkeep.blocks import prefill
from kvkeep.blocks.prompt import Encoded
from kvkeep.blocks.tokenize import BlockTokens, Span
from kvkeep.errors import UnsupportedError
from kvkeep.store import PrefixStore

GREEDY = {"max_new_tokens": 6, "do_sample": False}


def ids(n, seed=3):
    return torch.randint(2, 96, (1, n), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("smollm3", {"no_rope_layers": [0, 1]}),
        ("granite", {"attention_multiplier": 0.9}),
        ("llama", {"rms_norm_eps": 0.5}),
        ("llama", {"hidden_act": "relu"}),
        ("qwen3-moe", {"num_experts_per_tok": 1}),
        ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 77.0}}),
    ],
)
def test_the_same_weights_used_otherwise(family, change):
    one, store = tiny(family), PrefixStore()
    other = tiny(family, **change)
    other.load_state_dict(one.state_dict())
    wanted = other.generate(ids(30), **GREEDY)
    for model, found in ((one, 0), (other, 0), (other, 29)):
        kvkeep.attach(model, store=store)
        before = store.stats().hit_tokens
        output = model.generate(ids(30), **GREEDY)
        assert store.stats().hit_tokens - before == found
        kvkeep.detach(model)
    assert output.equal(wanted)
    names = {"name_or_path": "x", "max_position_embeddings": 64, "use_cache": False}
    assert kvkeep.fingerprint(tiny("llama", **names)) == kvkeep.fingerprint(tiny("llama"))


@pytest.mark.parametrize("change", ["row", "frequencies", "epsilon", "scaling"])
def test_a_model_that_was_changed(change):
    model, store = tiny("llama"), PrefixStore()
    kvkeep.attach(model, store=store)
    model.generate(ids(30), **GREEDY)
    layer = model.model.layers[1]
    if change == "row":
        model.model.embed_tokens.weight.data[int(ids(30)[0, 4])] += 1
    elif change == "frequencies":
        model.model.rotary_emb.inv_freq.data[1] *= 2
    elif change == "epsilon":
        layer.input_layernorm.variance_epsilon = 0.5
    else:
        layer.self_attn.scaling *= 2
    found = model.generate(ids(30), **GREEDY)
    assert store.stats().hit_tokens == 0
    kvkeep.detach(model)
    assert found.equal(model.generate(ids(30), **GREEDY))


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_frequencies_that_depend_on_the_length(kind):
    rope = growing_rope(kind)
    model = tiny("llama", rope_parameters=rope, max_position_embeddings=128)
    wanted = [model.generate(ids(n), **GREEDY) for n in (20, 60, 20)]
    store = PrefixStore()
    kvkeep.attach(model, store=store)
    for n, text in zip((20, 60, 20), wanted, strict=True):
        assert model.generate(ids(n), **GREEDY).equal(text)
    assert store.stats().entries == 0
    with pytest.raises(UnsupportedError, match="depend on a text's length"):
        store.prefill(model, ids(20))


@pytest.mark.parametrize(
    "odd",
    [
        {"use_cache": False},
        {"generation_config": GenerationConfig(use_cache=False, **GREEDY)},
        {"position_ids": torch.arange(5, 35)[None]},
        {"attention_mask": torch.ones(1, 30).index_fill(1, torch.arange(4), 0)},
        {"cache_implementation": "static"},
        {"cache_implementation": "dynamic"},
        {"generation_config": GenerationConfig(prompt_lookup_num_tokens=2, **GREEDY)},
        {"return_dict_in_generate": True},
        {"num_beams": 3},
        {"num_return_sequences": 2, "num_beams": 2},
        {"prefill_chunk_size": 7},
    ],
    ids=lambda odd: " ".join(map(str, odd)),
)
def test_any_options(odd):
    """The same as without a store, and nothing that makes a later prompt other."""
    model, store = tiny("llama"), PrefixStore()
    plain = copy.deepcopy(model)
    options = odd if "generation_config" in odd else GREEDY | odd
    kvkeep.attach(model, store=store)

    def text(of):
        found = of.generate(ids(30), **options)
        return getattr(found, "sequences", found)

    for _ in range(2):
        assert text(model).equal(text(plain))
    longer = torch.cat([text(model)[:1], ids(3, seed=9)], dim=1)
    assert model.generate(longer, **GREEDY).equal(plain.generate(longer, **GREEDY))
    store.check()


def test_a_prompt_with_the_padding_token_in_it():
    model, store = tiny("llama", pad_token_id=5), PrefixStore()
    prompt = ids(20)
    prompt[0, :4] = 5
    wanted = model.generate(prompt, **GREEDY)
    kvkeep.attach(model, store=store)
    assert model.generate(prompt, **GREEDY).equal(wanted)


def test_training_is_not_stored():
    tuned = get_peft_model(
        tiny("llama"), LoraConfig(r=4, target_modules=["k_proj"], lora_dropout=0.5)
    )
    store = PrefixStore()
    kvkeep.attach(tuned, store=store)
    tuned.train()
    tuned.generate(input_ids=ids(20), **GREEDY)
    assert store.stats().entries == 0


def test_adapters_named_for_a_prompt_with_blocks():
    tuned = get_peft_model(
        tiny("llama"), LoraConfig(r=4, target_modules=["k_proj"], init_lora_weights=False)
    ).eval()
    inner, store = tuned.get_base_model(), PrefixStore()
    wanted = tuned.generate(input_ids=ids(40), **GREEDY)
    with tuned.disable_adapter():
        base = tuned.generate(input_ids=ids(40), **GREEDY)
    kvkeep.attach(tuned, store=store, recompute="all")
    encoded = Encoded(ids(40)[0], [BlockTokens("", Span(5, 30))])
    with tuned.base_model._enable_peft_forward_hooks(adapter_names=["__base__"]):
        assert inner.generate(encoded, **GREEDY).equal(base)
    assert store.stats().entries == 0
    assert inner.generate(encoded, **GREEDY).equal(wanted)


def test_threads_on_one_model():
    """Each blends and generates while others do."""
    model, store = tiny("llama", max_position_embeddings=256, num_hidden_layers=3), PrefixStore()
    texts = [ids(30, seed)[0] for seed in range(3)]
    prompts = [ids(25, seed) for seed in range(10, 16)]
    wanted = [model.generate(prompt, **GREEDY) for prompt in prompts]
    kvkeep.attach(model, store=store)

    def run(number):
        prefill(model, texts[number % 3 :] + texts[: number % 3], recompute=0.3)
        return model.generate(prompts[number % 6], **GREEDY)

    with ThreadPoolExecutor(4) as pool:
        for number, found in enumerate(pool.map(run, range(8))):
            assert found.equal(wanted[number % 6])
    for prompt, text in zip(prompts, wanted, strict=True):
        assert model.generate(prompt, **GREEDY).equal(text)
    store.check()
