"""The weights of a LitGPT model as transformers lays them out, by LitGPT's own conversion."""

from __future__ import annotations

from typing import Any

from litgpt.model import GPT
from litgpt.scripts.convert_lit_checkpoint import (
    copy_weights_gemma_2,
    copy_weights_gemma_3,
    copy_weights_gpt_neox,
    copy_weights_llama,
    copy_weights_olmo2,
    copy_weights_phi,
    copy_weights_qwen_2_5,
    copy_weights_qwen_3,
)
from torch import Tensor

_COPY: dict[str, Any] = {
    "gemma": copy_weights_llama,
    "gemma2": copy_weights_gemma_2,
    "gemma3_text": copy_weights_gemma_3,
    "gpt_neox": copy_weights_gpt_neox,
    "llama": copy_weights_llama,
    "mistral": copy_weights_llama,
    "olmo2": copy_weights_olmo2,
    "phi": copy_weights_phi,
    "phi3": copy_weights_phi,
    "qwen2": copy_weights_qwen_2_5,
    "qwen3": copy_weights_qwen_3,
}
"""LitGPT's conversions, by transformers' type of model. Each of these types is one stack of dense
layers."""


def as_transformers(gpt: GPT, kind: str) -> dict[str, Tensor] | None:
    """The weights of a model by transformers' names. Most of them are views of its own.

    Args:
        kind: transformers' type of model.

    Returns:
        None if they do not have such a layout, or the model has weights of adapters.
    """
    if kind not in _COPY or type(gpt) is not GPT:
        return None
    found: dict[str, Tensor] = {}
    try:
        _COPY[kind](gpt.config, found, gpt.state_dict())
    except (KeyError, NotImplementedError, RuntimeError, ValueError):  # of another type
        return None
    return found
