"""Recurrent layers that ignore their state when they are given several tokens.

Some models (Jamba, Zamba) read a recurrent state only if they are given a single token; a second
chunk of a prompt would be computed as if nothing had come before. An attached model's layers of
this kind are given such a chunk token by token.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from kvkeep.hf.cache import Cache
from kvkeep.hf.cache_argument import as_cache
from kvkeep.hf.config import decoder_config
from kvkeep.hf.rehearsal import cheap_forwards, without_weights

_MASK = "attention_mask"


Routed = list[tuple[nn.Module, Any]]
"""Layers that are given tokens one by one, and the forward that each had of its own: None, or that
of a library, such as accelerate's, which moves weights to the device first."""


def route_tokens(decoder: PreTrainedModel) -> Routed:
    """Let recurrent layers that need it compute token by token wherever the cache holds a state;
    returns them, for `unroute_tokens`."""
    routed: Routed = []
    for path in _layers_that_ignore_their_state(decoder):
        module = decoder.get_submodule(path)
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
    cache = next((x for x in given.values() if isinstance(x, Cache)), None)
    place: Any = module.layer_idx
    n = hidden_states.shape[1]
    if n == 1 or cache is None or not cache.has_previous_state(place):
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
    """Records which modules set a recurrent state, by their paths; or, while `watching`, raises."""

    watching = False

    def __init__(self, decoder: PreTrainedModel) -> None:
        super().__init__(config=decoder_config(decoder.config))
        self._running: list[str] = []
        self.paths: dict[str, None] = {}
        for path, module in decoder.named_modules():
            module.register_forward_pre_hook(partial(self._enter, path))
            module.register_forward_hook(self._leave)

    def _enter(self, path: str, *_: Any) -> None:
        self._running.append(path)

    def _leave(self, *_: Any) -> None:
        self._running.pop()

    def update_recurrent_state(self, recurrent_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.watching:
            raise _StateReachedError(bool(recurrent_states.isnan().any()))
        self.paths[self._running[-1]] = None
        state: Tensor = super().update_recurrent_state(recurrent_states, *args, **kwargs)
        return state


def _layers_that_ignore_their_state(decoder: PreTrainedModel) -> Iterable[str]:
    """The paths of the recurrent layers, if the first layer's state after two tokens does not
    depend on the one before them. It is set to NaN to find out."""
    tokens = {"input_ids": torch.zeros(1, 2, dtype=torch.int64), "use_cache": True}
    with cheap_forwards():
        copied = without_weights(decoder)
        cache = _WatchedCache(copied)
        copied(**tokens, **as_cache(copied, cache))
        for layer in cache.layers:
            for state in getattr(layer, "recurrent_states", {}).values():
                if state is not None:
                    state.fill_(torch.nan)
        cache.watching = True
        try:
            copied(**tokens, **as_cache(copied, cache))
        except _StateReachedError as seen:
            return () if seen.args[0] else cache.paths
    return ()  # it has only convolutions
