"""Caches that transformers made, loaded into the same weights in LitGPT, and refused for others."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch
from litgpt.scripts.convert_hf_checkpoint import (
    copy_weights_hf_llama,
    copy_weights_qwen_2_5,
    copy_weights_qwen_3,
)
from support.slow import every
from support.tiny_litgpt import tiny_gpt, translated
from support.tiny_models import tiny

import kvkeep
from kvkeep.errors import SavedCacheError
from kvkeep.hf.loading.rebuilt import rebuilt
from kvkeep.host import host_of
from kvkeep.host.saving import save

OF = {
    "llama": (copy_weights_hf_llama, {}),
    "mistral": (
        copy_weights_hf_llama,
        {"sliding_window_size": 8, "sliding_window_indices": [1, 1, 1]},
    ),
    "qwen2": (copy_weights_qwen_2_5, {"attn_bias": True}),
    "qwen3": (copy_weights_qwen_3, {"norm_qk": True}),
}
NEW = 12


def ids(n=20):
    return torch.randint(2, 96, (1, n), generator=torch.Generator().manual_seed(3))


def pair(family="llama", dtype=torch.float32, **options):
    """A model of transformers, and its twin in LitGPT."""
    model = tiny(family, head_dim=8, num_hidden_layers=3, **options)
    for weight in model.parameters():  # and no buffers, as transformers loads a model
        weight.data = weight.data.to(dtype)
    copy, settings = OF[family]
    return model, translated(model, copy, **settings).to(dtype)


@torch.no_grad()
def continued(model, path, prompt, spec="keep_all"):
    """The greedy text, and the cache of all but the prompt's last token in a file."""
    with kvkeep.attach(model):
        cache = kvkeep.Cache(model, spec)
        model(prompt[:, :-1], past_key_values=cache)
        cache.save(path)
        return model.generate(
            prompt, past_key_values=cache, max_new_tokens=NEW, do_sample=False, eos_token_id=[]
        )


@torch.no_grad()
def resumed(gpt, path, prompt):
    """The same by LitGPT's own forward, from the file."""
    with kvkeep.attach(gpt) as attachment:
        attachment.cache = kvkeep.load(path, gpt)
        for at in range(prompt.shape[1] - 1, prompt.shape[1] - 1 + NEW):
            logits = gpt(prompt[:, -1:], torch.tensor([at]))
            prompt = torch.cat([prompt, logits[:, -1:].argmax(-1)], dim=1)
    return prompt


@pytest.mark.parametrize(
    ("family", "spec"),
    [
        ("llama", "keep_all"),
        ("llama", "h2o:12+int8"),
        ("mistral", "keep_all"),
        ("qwen2", "keep_all"),
        ("qwen3", "keep_all"),
    ],
)
def test_goes_on_with_the_same_text(family, spec, tmp_path):
    model, gpt = pair(family)
    expected = continued(model, tmp_path / "a.kv", ids(), spec)
    assert resumed(gpt, tmp_path / "a.kv", ids()).equal(expected)
    assert not host_of(gpt).attached


def test_rope_of_llama_3(tmp_path):
    numbers = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope = {"rope_type": "llama3", "rope_theta": 10000.0, "original_max_position_embeddings": 32}
    model, gpt = pair(rope_parameters=rope | numbers)
    continued(model, tmp_path / "a.kv", ids())
    with pytest.raises(SavedCacheError, match=r"its rope_parameters is .*llama3"):
        kvkeep.load(tmp_path / "a.kv", gpt)
    gpt.config.rope_adjustments = numbers | {"original_max_seq_len": 32}
    gpt.cos, gpt.sin = gpt.rope_cache()
    assert kvkeep.load(tmp_path / "a.kv", gpt).fed == 19


def test_what_is_a_number_of_no_config_is_computed(tmp_path):
    model, gpt = pair()
    continued(model, tmp_path / "a.kv", ids())
    gpt.transformer.h[1].mlp.register_forward_hook(lambda _, __, output: output * 2)
    with pytest.raises(SavedCacheError, match="different keys in layer 2"):
        kvkeep.load(tmp_path / "a.kv", gpt)


def test_tied_embeddings_and_half_precision(tmp_path):
    model, gpt = pair(dtype=torch.bfloat16, tie_word_embeddings=True)
    continued(model, tmp_path / "a.kv", ids())
    assert kvkeep.load(tmp_path / "a.kv", gpt).fed == 19
    gpt.lm_head.weight.data[0] += 1  # LitGPT ties nothing
    with pytest.raises(SavedCacheError, match="weights differ"):
        kvkeep.load(tmp_path / "a.kv", gpt)


@pytest.mark.slow  # reads a model's weights four times
def test_a_real_checkpoint(smollm2, tmp_path):
    from kvkeep_lab.bench.litgpt_systems import converted

    model, tokenizer = smollm2
    text = "The capital of France is Paris. Its river is"
    prompt = tokenizer(text, return_tensors="pt").input_ids
    expected = continued(model, tmp_path / "a.kv", prompt)
    assert resumed(converted(model), tmp_path / "a.kv", prompt).equal(expected)


def nudge(gpt):
    """The smallest change of one weight that no text shows."""
    weight = gpt.transformer.h[1].attn.qkv.weight.data
    weight[-1, -1] = weight[-1, -1].nextafter(torch.tensor(9.0))


def faster(gpt):
    gpt.config.rope_base *= 2
    gpt.cos, gpt.sin = gpt.rope_cache()


def turned(gpt):
    """Only the table differs, and little."""
    angle = torch.atan2(gpt.sin, gpt.cos) * (1 + 1e-5)
    gpt.cos, gpt.sin = angle.cos(), angle.sin()


def coarser(gpt):
    gpt.transformer.h[2].norm_1.eps = 0.1


def wider(gpt):
    gpt.config.sliding_window_size = 16
    for block in gpt.transformer.h:
        block.attn.apply_sliding_window_attention = True


def sharper(gpt):
    gpt.config.attention_scores_scalar = 2


@pytest.mark.parametrize(
    ("change", "reason"),
    every(
        2,
        [
            (nudge, "weights differ"),
            (faster, "its rope_parameters is"),
            (turned, "rotates keys differently"),
            (coarser, "different keys in layer 2"),
            (wider, "different windows"),
            (sharper, "of another library.* of this LitGPT model"),
        ],
    ),
)
def test_another_model_of_the_same_shape_is_refused(change, reason, tmp_path):
    """Also if only what a module computes differs, not its weights."""
    model, gpt = pair()
    continued(model, tmp_path / "a.kv", ids())
    kvkeep.load(tmp_path / "a.kv", gpt)
    change(gpt)
    with pytest.raises(SavedCacheError, match=reason):
        kvkeep.load(tmp_path / "a.kv", gpt)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 10009.0}},
            "its rope_parameters is .*10009",
        ),
        ({"rms_norm_eps": 1.001e-6}, "its rms_norm_eps is 1.001e-06, not 1e-06"),
    ],
)
def test_numbers_that_hardly_change_a_key_are_compared_exactly(options, reason, dtype, tmp_path):
    model, _ = pair(dtype=dtype, **options)
    gpt = pair(dtype=dtype)[1]
    gpt.load_state_dict(pair(dtype=dtype, **options)[1].state_dict())
    continued(model, tmp_path / "a.kv", ids())
    with pytest.raises(SavedCacheError, match=reason):
        kvkeep.load(tmp_path / "a.kv", gpt)


def eps(model):
    model.model.layers[2].input_layernorm.variance_epsilon = 0.1


def frequencies(model):
    model.model.rotary_emb.inv_freq *= 2


@pytest.mark.parametrize(
    ("change", "reason"), [(eps, "modules differ"), (frequencies, "buffers d")]
)
def test_a_cache_of_a_changed_model_is_refused(change, reason, tmp_path):
    """Its config and weights say nothing of the change."""
    model, gpt = pair()
    change(model)
    continued(model, tmp_path / "a.kv", ids())
    with pytest.raises(SavedCacheError, match=reason):
        kvkeep.load(tmp_path / "a.kv", gpt)
    assert kvkeep.load(tmp_path / "a.kv", gpt, force=True).fed == 19


def test_other_shapes_and_types_are_refused(tmp_path):
    model, gpt = pair()
    continued(model, tmp_path / "a.kv", ids())
    for other in (tiny_gpt("pythia"), tiny_gpt("llama"), tiny_gpt("llama", n_layer=3)):
        with pytest.raises(SavedCacheError, match="made with another model"):
            kvkeep.load(tmp_path / "a.kv", other)
    continued(tiny("gpt2"), tmp_path / "b.kv", ids())  # LitGPT has no such type
    with pytest.raises(SavedCacheError, match=r"of another library.* of this LitGPT model"):
        kvkeep.load(tmp_path / "b.kv", gpt)
    with kvkeep.attach(gpt), torch.no_grad():
        host_of(gpt).feed(ids(), cache := host_of(gpt).new_cache())
    save(cache, tmp_path / "c.kv", gpt)
    with pytest.raises(SavedCacheError, match=r"of another library.* of this transformers model"):
        kvkeep.load(tmp_path / "c.kv", model)


def test_a_hostile_config_builds_nothing(monkeypatch):
    """What a file says of a model is compared with the weights before a module is built."""
    model, gpt = pair()
    found = host_of(model).fingerprint()
    weights, fields = host_of(gpt).as_transformers("llama")[0], json.loads(found["config"])
    build = partial(rebuilt, weights=weights, layers=3, positions=128)
    assert (
        build(found)
        .model.layers[0]
        .self_attn.q_proj.weight.equal(model.model.layers[0].self_attn.q_proj.weight)
    )
    for change in (
        {"num_hidden_layers": 10**9},
        {"hidden_size": 10**9},
        {"hidden_size": "x"},
        {"model_type": "../x"},
        {"num_attention_heads": 0},
        {"vocab_size": 97},
        {"_attn_implementation": "somebody/kernel"},
        {"quantization_config": {}},
        {"auto_map": {}},
        {"partial_rotary_factor": 1e7},
    ):
        with pytest.raises(kvkeep.UnsupportedError, match="cannot be built"):
            build(found | {"config": json.dumps(fields | change)})
    with pytest.raises(kvkeep.UnsupportedError, match="cannot be built"):
        build(found | {"config": "[" * 100_000})
    usual = json.loads(found["rope"])
    for rope in ({"partial_rotary_factor": 1e7}, {"full": {"partial_rotary_factor": 1e7}}):
        with pytest.raises(kvkeep.UnsupportedError, match="not between 0 and 1"):
            build(found | {"rope": json.dumps(usual | rope)})
    strange = fields | {"attn_implementation": "somebody/kernel"}
    config = build(found | {"config": json.dumps(strange)}).config  # which chose nothing by them
    assert config._attn_implementation in ("sdpa", "eager")


@pytest.mark.parametrize("at", ["built", "computes"])
def test_errors_of_the_rebuilt_model(at, monkeypatch, tmp_path):
    """One is a difference; memory that is too short is no difference."""
    model, gpt = pair()
    continued(model, tmp_path / "a.kv", ids())
    name = "__init__" if at == "built" else "forward"
    error = ValueError("odd")

    def fails(*_, **__):
        raise error

    monkeypatch.setattr(type(model), name, fails)
    monkeypatch.setattr(type(model.model), name, fails)
    with pytest.raises(SavedCacheError, match=r"another model.*odd"):
        kvkeep.load(tmp_path / "a.kv", gpt)
    error = MemoryError("none left")
    with pytest.raises(MemoryError, match="none left"):
        kvkeep.load(tmp_path / "a.kv", gpt)
