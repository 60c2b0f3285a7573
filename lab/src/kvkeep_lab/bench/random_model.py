"""Models with random weights and caches with random content, to measure speed without a
download."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from kvkeep.cache import Cache
from kvkeep.errors import UnsupportedError
from kvkeep.host.placement import dtype_named

RANDOM: dict[str, dict[str, Any]] = json.loads(
    Path(__file__).with_name("random_models.json").read_text("utf-8")
)
"""Configs by name: of the shape of Llama 3.2 1B, and smaller ones, in which three layers of four
are recurrent (Qwen 3.5), which cache a latent (DeepSeek V3), of which half of the layers read the
keys and values of other layers (Gemma 4), and of which ten of twelve layers have a sliding window
(Gemma 3)."""

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
    """A model of `RANDOM` with random weights, created on the device."""
    config = AutoConfig.for_model(**RANDOM[name], tie_word_embeddings=True)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.eval()


def fill(cache: Any, model: Any, tokens: int) -> Any:
    """Fill each layer of an empty cache, kvkeep's or transformers', with `tokens` random keys and
    values, which are the same for every cache of this model; returns the cache.

    Raises:
        UnsupportedError: the model caches more than keys and values of each layer.
    """
    config = model.config
    if config.model_type != "llama":
        raise UnsupportedError(
            f"a cache of a random {config.model_type} cannot be filled; use random-1b"
        )
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
