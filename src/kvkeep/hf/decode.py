"""The plain greedy loop, for measuring: one cache of any system, one step at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from kvkeep.hf.attach import attach
from kvkeep.hf.cache import Cache


def new_cache(system: str, model: PreTrainedModel) -> Any:
    """An empty cache: "hf-dynamic" is transformers' default, anything else a kvkeep spec, for
    which the model is attached."""
    if system == "hf-dynamic":
        return DynamicCache(config=model.config)
    attach(model, system)
    return Cache(model, system)


def live_bytes(cache: Any) -> int:
    """Bytes of the keys and values a cache holds, positions included where it has them."""
    if isinstance(cache, Cache):
        return cache.live_bytes
    return sum(x.numel() * x.element_size() for keys, values, _ in cache for x in (keys, values))


@torch.inference_mode()
def decode(
    model: PreTrainedModel,
    prompt: Tensor,
    cache: Any,
    steps: int,
    after_step: Callable[[], None] = lambda: None,
) -> Tensor:
    """Prefill `prompt` (B, n), then feed `steps` greedy tokens; returns their ids (B, steps).

    `after_step` is called after the prefill and after every step.
    """
    tokens, fed = [], prompt
    for _ in range(steps):
        logits = model(fed, past_key_values=cache, logits_to_keep=1).logits
        after_step()
        fed = logits[:, -1:].argmax(dim=-1)
        tokens.append(fed)
    model(fed, past_key_values=cache, logits_to_keep=1)
    after_step()
    return torch.cat(tokens, dim=1)
