"""Tiny random models of every supported family, for tests."""

from __future__ import annotations

from typing import Any

import torch
import transformers as tf
from transformers import PreTrainedModel

WINDOW = 8
"""Sliding window of the families that have one; the tests' texts are longer."""

_BASE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_SLIDING, _FULL = "sliding_attention", "full_attention"
_HYBRID = {"sliding_window": WINDOW, "layer_types": [_SLIDING, _FULL]}
_SHARED = {
    "sliding_window": WINDOW,
    "num_hidden_layers": 6,
    "num_kv_shared_layers": 3,
    "layer_types": [_SLIDING, _SLIDING, _FULL, _SLIDING, _FULL, _FULL],
    "head_dim": 8,
    "vocab_size_per_layer_input": 96,
    "hidden_size_per_layer_input": 8,
}
"""The last three layers reuse the keys and values of the second and the third."""

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "mistral": ("Mistral", {"sliding_window": WINDOW}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "sliding_window": WINDOW}),
    "qwen2": ("Qwen2", {}),
    "qwen2-sliding": (
        "Qwen2",
        {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": WINDOW},
    ),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3-moe": ("Qwen3Moe", {**_MOE, "head_dim": 8}),
    "phi": ("Phi", {"num_key_value_heads": 4}),
    "phi3": ("Phi3", {"sliding_window": WINDOW}),
    "gemma": ("Gemma", {"head_dim": 16, "num_key_value_heads": 1}),
    "gemma2": ("Gemma2", {**_HYBRID, "head_dim": 8, "attn_logit_softcapping": 5.0}),
    "gemma3": ("Gemma3", {**_HYBRID, "head_dim": 8}),
    "llama4": (
        "Llama4",
        {
            "head_dim": 8,
            "intermediate_size_mlp": 48,
            "attention_chunk_size": WINDOW,
            "no_rope_layers": [1, 0],
            "num_local_experts": 2,
            "moe_layers": [1],
        },
    ),
    "gemma3n": ("Gemma3n", {**_SHARED, "laurel_rank": 8}),
    "gemma4": ("Gemma4", {**_SHARED, "global_head_dim": 16}),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 0]}),
    "granite": ("Granite", {"attention_multiplier": 0.3}),
    "olmo2": ("Olmo2", {}),
    "starcoder2": ("Starcoder2", {"sliding_window": WINDOW}),
    "glm4": ("Glm4", {"head_dim": 8}),
    "cohere": ("Cohere", {}),
    "gpt-neox": ("GPTNeoX", {}),
    "gpt2": ("GPT2", {}),
    "opt": ("OPT", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "gpt-oss": ("GptOss", {**_HYBRID, "head_dim": 8, "num_local_experts": 4}),
    "deepseek-v3": (
        "DeepseekV3",
        {
            "num_key_value_heads": 4,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 12,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "moe_intermediate_size": 24,
            "first_k_dense_replace": 1,
        },
    ),
}

UNGRAPHED = ("gemma3n", "gemma4")
"""Families that no graph computes: they expand a latent, or their layers share slots."""

_MODEL_CLASS = {"Gemma3": "Gemma3ForCausalLM", "GPT2": "GPT2LMHeadModel"}
_CONFIG_CLASS = {
    "Gemma3": "Gemma3TextConfig",
    "Gemma3n": "Gemma3nTextConfig",
    "Gemma4": "Gemma4TextConfig",
    "Llama4": "Llama4TextConfig",
}


IMAGE = 95
"""The token of images in models with vision, four for each."""


_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
    "projection_dim": 32,
}


def with_vision(**overrides: Any) -> PreTrainedModel:
    """A tiny Gemma 3 with a vision tower."""
    both = tf.Gemma3Config(
        text_config=config("gemma3", **overrides),
        vision_config=tf.SiglipVisionConfig(**_VISION),
        mm_tokens_per_image=4,
        image_token_index=IMAGE,
        boi_token_index=93,
        eoi_token_index=94,
    )
    torch.default_generator.manual_seed(0)
    return vivid(tf.Gemma3ForConditionalGeneration(both).eval())


def growing_rope(kind: str) -> dict[str, Any]:
    """Rotary parameters whose frequencies follow the length of a text: "dynamic" or "longrope"."""
    rope: dict[str, Any] = {"rope_type": kind, "factor": 4.0, "rope_theta": 1e4}
    if kind == "longrope":
        rope |= {"long_factor": [9.0] * 4, "short_factor": [1.0] * 4}
        rope |= {"original_max_position_embeddings": 32}
    return rope


def config(name: str, **overrides: Any) -> Any:
    """A tiny config of a family."""
    prefix, options = FAMILIES[name]
    cls = getattr(tf, _CONFIG_CLASS.get(prefix, f"{prefix}Config"))
    return cls(**{**_BASE, **options, **overrides})


def tiny(name: str, **overrides: Any) -> PreTrainedModel:
    """A tiny model with weights large enough that its attention and its text vary."""
    prefix, _ = FAMILIES[name]
    torch.default_generator.manual_seed(0)
    cls = getattr(tf, _MODEL_CLASS.get(prefix, f"{prefix}ForCausalLM"))
    return vivid(cls(config(name, **overrides)).eval())


def vivid(model: PreTrainedModel) -> PreTrainedModel:
    """The model with weights so large that its text varies."""
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if weight.dim() >= 2:
                weight.normal_(0.0, 1.5 * min(weight.shape) ** -0.5)
            elif "sink" in key or "bias" in key:
                weight.normal_(0.0, 0.5)
    return model
