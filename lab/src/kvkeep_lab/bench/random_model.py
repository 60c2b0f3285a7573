"""Models with random weights and caches with random content, to measure speed without a
download."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from kvkeep.cache import Cache
from kvkeep.host.placement import dtype_named

RANDOM: dict[str, dict[str, Any]] = {
    "random-1b": {
        "num_hidden_layers": 16,
        "hidden_size": 2048,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "intermediate_size": 8192,
        "vocab_size": 128256,
        "max_position_embeddings": 1 << 18,
    },
    "random-tiny": {
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 128,
        "vocab_size": 256,
        "max_position_embeddings": 1 << 12,
    },
}
"""Shapes of Llama models by name; the first is that of Llama 3.2 1B."""

_SHARP = 3.0
"""Factor on random keys. It concentrates attention on a few keys, so that errors are visible."""


def model_named(name: str, dtype: str, device: torch.device) -> tuple[Any, Any]:
    """A model and its tokenizer; a random model has none.

    Args:
        name: of `RANDOM`, or as `kvkeep.hf.models.load` takes it.
    """
    if name in RANDOM:
        return random_model(name, dtype_named(dtype), device), None
    from kvkeep.hf.models import load  # noqa: PLC0415 (it needs packages that may be missing)

    return load(name, dtype, str(device))


def random_model(name: str, dtype: torch.dtype, device: torch.device) -> Any:
    """A Llama with a shape from `RANDOM` and random weights, created on the device."""
    config = LlamaConfig(**RANDOM[name], tie_word_embeddings=True)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.eval()


def fill(cache: Any, model: Any, tokens: int) -> Any:
    """Fill each layer of an empty cache, kvkeep's or transformers', with `tokens` random keys and
    values, which are the same for every cache of this model; returns the cache."""
    config = model.config
    generator = torch.Generator(model.device).manual_seed(0)
    there: dict[str, Any] = {"generator": generator, "device": model.device, "dtype": model.dtype}
    shape = (1, config.num_key_value_heads, tokens, config.head_dim)
    for index in range(config.num_hidden_layers):
        k, v = torch.randn(shape, **there) * _SHARP, torch.randn(shape, **there)
        if isinstance(cache, Cache):
            layer = cache.layers[index]
            layer.extend(k, v)
            layer.settle()
        else:
            cache.update(k, v, index)
    return cache
