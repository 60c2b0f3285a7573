"""Greedy decoding with a cache of any kind, for measurements."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, StaticCache

from kvkeep.hf.cache import Cache
from kvkeep.hf.cache_argument import as_cache
from kvkeep.hf.config import base_config, decoder_config
from kvkeep_lab.bench.options import DYNAMIC, STATIC


def new_cache(system: str, model: PreTrainedModel, capacity: int | None = None) -> Any:
    """An empty cache: `DYNAMIC`, `STATIC` (of `capacity` tokens), or a kvkeep spec."""
    if system == DYNAMIC:
        return DynamicCache(config=model.config)
    if system == STATIC:
        return StaticCache(config=model.config, max_cache_len=capacity or 0)
    return Cache(model, system, capacity=capacity)


def live_bytes(cache: Any) -> int:
    """Bytes of the keys and values that a cache holds, including positions if it has them."""
    if isinstance(cache, Cache):
        return cache.live_bytes
    return sum(x.nbytes for x in buffers(cache))


def allocated_bytes(cache: Any) -> int:
    """Bytes allocated for them, spare slots included."""
    return cache.nbytes if isinstance(cache, Cache) else live_bytes(cache)


def buffers(cache: Any) -> list[Tensor]:
    """The tensors of a cache, which are views of its buffers."""
    if isinstance(cache, Cache):
        parts = [planes for layer in cache.layers for planes in layer.state().parts.values()]
        return [plane for planes in parts for plane in planes.values()]
    return [x for keys, values, _ in cache for x in (keys, values)]


def bytes_per_token(model: PreTrainedModel) -> int:
    """Bytes of one token's keys and values in all layers, the least that a step must read."""
    config = decoder_config(base_config(model))
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return int(2 * config.num_hidden_layers * heads * width * model.dtype.itemsize)


@torch.inference_mode()
def decode(
    model: PreTrainedModel,
    prompt: Tensor,
    cache: Any,
    steps: int,
    after_step: Callable[[], None] = lambda: None,
    chunk: int | None = None,
) -> None:
    """Prefill `prompt` (B, n), then feed `steps` greedy tokens.

    `after_step` is called after the prefill and after every step. The prompt is fed in one call, or
    `chunk` tokens a call.
    """
    *before, fed = torch.split(prompt, chunk or prompt.shape[1], dim=1)
    for part in before:
        model(part, **as_cache(model, cache), logits_to_keep=1)
    for _ in range(steps):
        logits = model(fed, **as_cache(model, cache), logits_to_keep=1).logits
        after_step()
        fed = logits[:, -1:].argmax(dim=-1)
    model(fed, **as_cache(model, cache), logits_to_keep=1)
    after_step()


def filled_from(full: Cache, cache: Any) -> Any:
    """Copy the slots of `full`, in order, into an empty cache of another system; returns that."""
    for index, layer in enumerate(full.layers):
        planes = layer.state().parts["slots"]
        cache.update(planes["k"], planes["v"], index)
    return cache
