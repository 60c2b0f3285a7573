"""Convert a LitGPT model to transformers' layout: the weights by LitGPT's own conversion, and the
config fields that follow from LitGPT's config."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from litgpt import Config
from litgpt.model import GPT
from litgpt.scripts.convert_lit_checkpoint import (
    copy_weights_llama,
    copy_weights_qwen_2_5,
    copy_weights_qwen_3,
)
from torch import Tensor

from kvkeep.host.tensors import named_weights

_COPY: dict[str, Any] = {
    "llama": copy_weights_llama,
    "mistral": copy_weights_llama,
    "qwen2": copy_weights_qwen_2_5,
    "qwen3": copy_weights_qwen_3,
}
"""LitGPT's conversions, by transformers' model type. In each of these types, every number that is
not a weight is a config field or is the same in all models."""

_FREE = {
    "hf_config",
    "name",
    # sizes
    "block_size",
    "head_size",
    "intermediate_size",
    "n_embd",
    "n_head",
    "n_layer",
    "n_query_groups",
    "padded_vocab_size",
    "padding_multiple",
    "vocab_size",
    # which weights exist
    "attn_bias",
    "bias",
    # compared as config fields, and as windows of layers
    "norm_eps",
    "rope_adjustments",
    "rope_base",
    "sliding_window_indices",
    "sliding_window_size",
}
"""Fields of LitGPT's config that may differ between models of one type."""

_LLAMA3 = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_seq_len": "original_max_position_embeddings",
}
"""Parameters of Llama 3's rotary frequencies: LitGPT's names -> transformers' names."""


def as_transformers(gpt: GPT, kind: str) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """Describe a model as a transformers model of a given type.

    Args:
        kind: transformers' model type.

    Returns:
        The weights by transformers' names, most of them views of the model's own; and all config
        fields of the type that weight shapes do not determine, with the sizes. None if the model is
        not of that type, or has an adapter's weights.
    """
    if kind not in _COPY or type(gpt) is not GPT:
        return None
    fields = _fields(gpt.config, kind)
    if fields is None:
        return None
    weights: dict[str, Tensor] = {}
    try:
        held = {name: x.detach() for name, x in named_weights(gpt).items()}
        _COPY[kind](gpt.config, weights, held)
    except (KeyError, NotImplementedError, RuntimeError, ValueError):  # another model type
        return None
    return weights, fields


def _fields(config: Config, kind: str) -> dict[str, Any] | None:
    """The config fields of a type; None if LitGPT's config describes no model of the type."""
    rope = _rope(config)
    usual = Config(
        n_layer=1,
        intermediate_size=1,
        norm_class_name="RMSNorm",
        mlp_class_name="LLaMAMLP",
        norm_qk=kind == "qwen3",
        parallel_residual=False,
        rotary_percentage=1.0,
    )
    one, other = asdict(config), asdict(usual)
    if one["attention_scores_scalar"] == config.head_size:  # the default
        one["attention_scores_scalar"] = None
    if rope is None or any(one[name] != other[name] for name in one.keys() - _FREE):
        return None
    return {
        "hidden_act": "silu",
        "hidden_size": config.n_embd,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.n_head,
        "num_hidden_layers": config.n_layer,
        "num_key_value_heads": config.n_query_groups,
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": rope,
        "vocab_size": config.padded_vocab_size,
    }


def _rope(config: Config) -> dict[str, Any] | None:
    """transformers' rope parameters; None if kvkeep does not support this rotary embedding."""
    theta, adjusted = config.rope_base, config.rope_adjustments
    if adjusted is None:
        return {"rope_type": "default", "rope_theta": theta}
    if adjusted.keys() != _LLAMA3.keys():
        return None
    given = {_LLAMA3[name]: value for name, value in adjusted.items()}
    return {"rope_type": "llama3", "rope_theta": theta} | given
