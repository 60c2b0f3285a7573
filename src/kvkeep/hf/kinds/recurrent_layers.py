"""Divides forwards of recurrent layers: into tokens, or into the sequences of a batch.

Layers of some models (Jamba, Zamba) read their recurrent state only if they are given a single
token; they would compute a second chunk of a prompt as if it were the first. In an attached model,
these layers get later chunks token by token. In a packed forward, whose tokens are in one row, one
call computes all sequences with one token, as rows, and each longer sequence has its own call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from kvkeep.hf.cache_argument import as_cache
from kvkeep.hf.config import decoder_config
from kvkeep.hf.kinds.base import Replaced
from kvkeep.hf.kinds.recurrent_functions import hastened
from kvkeep.hf.kinds.states import KeepsStates, StatesOf
from kvkeep.hf.weightless import cheap_forwards, without_weights
from kvkeep.layer.packed_states import StatesPart


class Divided(Replaced):
    """A layer whose forwards are divided.

    Args:
        place: the layer's index in the model, if chunks after the first must be divided into
            tokens; None: they need not.
    """

    def __init__(self, module: nn.Module, place: Any) -> None:
        own = vars(module).get("forward") or hastened(module)
        super().__init__(module, "forward", partial(_forward, module, own, place))


def _forward(module: nn.Module, own: Any, place: Any, *args: Any, **kwargs: Any) -> Any:
    """The layer's forward; see `Divided`. `own`: a replacement of its class's forward, or None."""
    forward: Any = partial(type(module).forward, module) if own is None else own
    if place is not None:
        forward = partial(_token_by_token, place, forward)
    cache = cache_among(args, kwargs)
    if cache is None or not cache.packed_states.parts:
        return forward(*args, **kwargs)
    parts, places = cache.packed_states
    assert places is not None
    row, found = (1, len(places)), []
    for part in parts:

        def own_of(x: Any, part: StatesPart = part) -> Any:
            if isinstance(x, KeepsStates):
                return StatesOf(part.states)
            if isinstance(x, Tensor) and x.shape[:2] == row:
                return x[0, part.tokens.to(x.device)].view(part.rows, -1, *x.shape[2:])
            return x

        own_args, own_kwargs = changed((args, kwargs), own_of)
        found.append(forward(*own_args, **own_kwargs))
    return _joined(found, lambda some: torch.cat([x.flatten(0, 1) for x in some])[places][None])


def cache_among(args: Sequence[Any], kwargs: Mapping[str, Any]) -> KeepsStates | None:
    """The kvkeep cache among the arguments of a layer; None: no cache, or another one."""
    return next((x for x in (*args, *kwargs.values()) if isinstance(x, KeepsStates)), None)


def changed(x: Any, change: Callable[[Any], Any]) -> Any:
    """An argument after `change`, which is applied to each element of containers."""
    if isinstance(x, (tuple, list)):
        return tuple(changed(one, change) for one in x)
    if isinstance(x, dict):
        return {name: changed(one, change) for name, one in x.items()}
    return change(x)


def _joined(found: Sequence[Any], join: Callable[[Sequence[Tensor]], Tensor]) -> Any:
    """The outputs of several forwards, each a tensor, None, or a tuple of these, joined to one."""
    if found[0] is None:
        return None
    if isinstance(found[0], tuple):
        return tuple(_joined(each, join) for each in zip(*found, strict=True))
    return join(found)


def _token_by_token(place: Any, forward: Any, *args: Any, **kwargs: Any) -> Any:
    """A layer's forward, one token at a time after the first chunk.

    Args:
        place: the layer's index in the model.
    """
    cache = cache_among(args, kwargs)
    hidden: Tensor = args[0] if args else kwargs["hidden_states"]
    rows, n = hidden.shape[:2]
    if n == 1 or cache is None or not cache.has_previous_state(place):
        return forward(*args, **kwargs)
    found = []
    for token in range(n):

        def own_of(x: Any, token: int = token) -> Any:
            of_tokens = isinstance(x, Tensor) and x.shape[:2] == (rows, n)
            return x[:, token : token + 1] if of_tokens else x

        own_args, own_kwargs = changed((args, kwargs), own_of)
        found.append(forward(*own_args, **own_kwargs))
    return _joined(found, partial(torch.cat, dim=1))


class _StateReachedError(Exception):
    """Ends a forward. Its argument: whether the first recurrent layer has read its state."""


class _WatchedCache(DynamicCache):
    """Records the paths of modules that set a state, and of modules that attend or contain
    attention. While `watching`, raises at the first recurrent state instead."""

    watching = False

    def __init__(self, decoder: PreTrainedModel) -> None:
        super().__init__(config=decoder_config(decoder.config))
        self._running: list[str] = []
        self.recurrent: dict[str, None] = {}
        self.attending: set[str] = set()
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
        self.recurrent[self._running[-1]] = None
        state: Tensor = super().update_recurrent_state(recurrent_states, *args, **kwargs)
        return state

    def update_conv_state(self, *args: Any, **kwargs: Any) -> Tensor:
        self.recurrent[self._running[-1]] = None
        state: Tensor = super().update_conv_state(*args, **kwargs)
        return state

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.attending.update(self._running)
        found: tuple[Tensor, Tensor] = super().update(*args, **kwargs)
        return found


def recurrent_layers(decoder: PreTrainedModel) -> tuple[Iterable[str], bool]:
    """The paths of the recurrent layers, none if these also attend; and whether layers ignore
    their state in a chunk of two tokens. To find out, the states are set to NaN."""
    tokens = {"input_ids": torch.zeros(1, 2, dtype=torch.int64), "use_cache": True}
    with cheap_forwards():
        copied = without_weights(decoder)
        cache = _WatchedCache(copied)
        copied(**tokens, **as_cache(copied, cache))
        paths = () if cache.attending & cache.recurrent.keys() else tuple(cache.recurrent)
        for layer in cache.layers:
            for state in getattr(layer, "recurrent_states", {}).values():
                if state is not None:
                    state.fill_(torch.nan)
        cache.watching = True
        try:
            copied(**tokens, **as_cache(copied, cache))
        except _StateReachedError as seen:
            return paths, not seen.args[0]
    return paths, False  # the model has only convolutional states
