"""Tiny LitGPT models of several families, with random weights."""

from __future__ import annotations

import torch
from litgpt import GPT, Config

_SIZES = {"block_size": 128, "padded_vocab_size": 96, "n_layer": 2, "n_embd": 32}
_SIZES |= {"n_head": 4, "intermediate_size": 48}

FAMILIES = {
    "llama": {"name": "Llama-3.2-1B", "n_query_groups": 2, "head_size": 8},
    "pythia": {"name": "pythia-14m", "n_query_groups": 4, "head_size": 8},
    "falcon": {"name": "falcon-7b", "n_query_groups": 1, "head_size": 8},
    "mistral": {
        "name": "Mistral-7B-v0.1",
        "n_query_groups": 2,
        "head_size": 8,
        "sliding_window_size": 12,
        "sliding_window_indices": [1, 1],
    },
    "gemma2": {
        "name": "Gemma-2-2b",
        "n_query_groups": 2,
        "head_size": 8,
        "sliding_window_size": 12,
        "sliding_window_indices": [1, 0],
        "attention_scores_scalar": 8,
    },
    "gemma3": {
        "name": "Gemma-3-1b-it",
        "n_query_groups": 1,
        "head_size": 8,
        "sliding_window_size": 12,
        "sliding_window_indices": [1, 0],
        "rope_indices": [1, 0],
        "attention_scores_scalar": 8,
    },
    "qwen3": {"name": "Qwen3-0.6B-Base", "n_query_groups": 2, "head_size": 8},
    "olmo2": {"name": "OLMo-2-1124-7B", "n_query_groups": 2, "head_size": 8},
    "deepseek": {
        "name": "Llama-3.2-1B",
        "n_query_groups": 4,
        "head_size": 12,
        "latent_attention": {
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
        },
        "rope_adjustments": None,
    },
}


def tiny_gpt(family: str = "llama", seed: int = 0, kind: type[GPT] = GPT, **options) -> GPT:
    """A model whose attention shows in its logits."""
    torch.default_generator.manual_seed(seed)
    from litgpt.lora import Config as LoRAConfig

    config_of = LoRAConfig if kind.__module__ == "litgpt.lora" else Config
    gpt = kind(config_of.from_name(**(_SIZES | FAMILIES[family] | options)))
    gpt.apply(gpt._init_weights)
    for name, x in gpt.named_parameters():
        if x.dim() == 2 and "lora" not in name:
            x.data.normal_(std=x.shape[-1] ** -0.5)
            if "qkv" in name or "q_b" in name:
                x.data *= 2
    return gpt.eval()


def translated(model, copy_weights, **options) -> GPT:
    """A LitGPT model with the weights of a tiny transformers model, by LitGPT's own conversion."""
    config, weights = model.config, {}
    settings = Config(
        block_size=config.max_position_embeddings,
        vocab_size=config.vocab_size,
        padded_vocab_size=config.vocab_size,
        n_layer=config.num_hidden_layers,
        n_head=config.num_attention_heads,
        n_query_groups=config.num_key_value_heads,
        n_embd=config.hidden_size,
        head_size=config.head_dim,
        rotary_percentage=1.0,
        rope_base=config.rope_parameters["rope_theta"],
        parallel_residual=False,
        bias=False,
        norm_class_name="RMSNorm",
        norm_eps=config.rms_norm_eps,
        mlp_class_name="LLaMAMLP",
        intermediate_size=config.intermediate_size,
        **options,
    )
    copy_weights(settings, {}, weights, dict(model.state_dict()))
    gpt = GPT(settings)
    gpt.load_state_dict(weights)
    return gpt.eval()
