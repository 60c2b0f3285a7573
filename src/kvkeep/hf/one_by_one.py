"""Recurrent layers that ignore their state when they are given several tokens.

Some models (Jamba, Zamba) read a recurrent state only if they are given a single token; a second
chunk of a prompt would be computed as if nothing had come before. An attached model's layers of
this kind are given such a chunk token by token.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from kvkeep.hf.cache import Cache
from kvkeep.hf.config import decoder_config, recurrent_numbers
from kvkeep.hf.rehearsal import cheap_forwards, without_weights

_CACHE = "cache_params"
_MASK = "attention_mask"


Routed = list[tuple[nn.Module, Any]]
"""Layers that are given tokens one by one, and the forward that each had of its own: None, or that
of a library, such as accelerate's, which moves weights to the device first."""


def route_tokens(decoder: PreTrainedModel) -> Routed:
    """Let recurrent layers that need it compute token by token wherever the cache holds a state;
    returns them, for `unroute_tokens`."""
    if not _ignores_state(decoder):
        return []
    numbers = recurrent_numbers(decoder.config)
    routed: Routed = []
    for module in decoder.modules():
        place = getattr(module, "layer_idx", None)
        if place is None or not numbers[place]:
            continue
        if _CACHE in inspect.signature(module.forward).parameters:
            own = module.__dict__.get("forward")
            module.__dict__["forward"] = partial(_forward, module, own)
            routed.append((module, own))
    return routed


def unroute_tokens(routed: Routed) -> None:
    """Undo `route_tokens`."""
    for module, own in routed:
        module.__dict__.pop("forward", None)
        if own is not None:
            module.__dict__["forward"] = own


def _forward(module: nn.Module, own: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
    """The layer's forward, (B, n, width) -> (B, n, width), one token at a time after the first
    chunk. `own`: see `Routed`."""
    forward: Any = partial(type(module).forward, module) if own is None else own
    given = inspect.signature(forward).bind(hidden_states, *args, **kwargs).arguments
    given |= given.pop("kwargs", {})
    cache = given.get(_CACHE)
    place: Any = module.layer_idx
    n = hidden_states.shape[1]
    if n == 1 or not isinstance(cache, Cache) or not cache.has_previous_state(place):
        return forward(hidden_states, *args, **kwargs)
    rest = {name: x for name, x in given.items() if name not in ("hidden_states", _MASK)}
    mask = given.get(_MASK)
    found = []
    for i in range(n):
        real = {} if mask is None else {_MASK: mask[:, i : i + 1]}
        found.append(forward(hidden_states[:, i : i + 1], **rest, **real))
    return torch.cat(found, dim=1)


class _StateReachedError(Exception):
    """Ends a forward; says whether the first recurrent layer read its state."""


class _WatchedCache(DynamicCache):
    watching = False

    def update_recurrent_state(self, recurrent_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.watching:
            raise _StateReachedError(bool(recurrent_states.isnan().any()))
        state: Tensor = super().update_recurrent_state(recurrent_states, *args, **kwargs)
        return state


def _ignores_state(decoder: PreTrainedModel) -> bool:
    """Whether the first recurrent layer's state after two tokens does not depend on the one before
    them. It is set to NaN to find out."""
    text = decoder_config(decoder.config)
    tokens = {"input_ids": torch.zeros(1, 2, dtype=torch.int64), "use_cache": True}
    with cheap_forwards():
        copied = without_weights(decoder)
        cache = _WatchedCache(config=text)
        copied(**tokens, past_key_values=cache)
        for layer in cache.layers:
            for state in getattr(layer, "recurrent_states", {}).values():
                if state is not None:
                    state.fill_(torch.nan)
        cache.watching = True
        try:
            copied(**tokens, past_key_values=cache)
        except _StateReachedError as seen:
            return not seen.args[0]
    return False  # it has only convolutions
