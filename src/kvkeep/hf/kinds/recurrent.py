"""Models with layers that do not attend but are recurrent or convolutional.

A cache holds transformers' own cache layers for their states. Rejected drafts are removed from the
slots by truncation, but a state cannot be truncated: it returns to a copy from before the forward,
and the accepted tokens are fed again. Some models (Jamba, Zamba) read a recurrent state only if
they are given a single token; a second chunk of a prompt would be computed as if nothing had come
before. An attached model's layers of this kind are given such a chunk token by token.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar
from weakref import ref

import torch
import transformers
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import (
    DummyLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from kvkeep.errors import RollbackError, StateError, UnsupportedError
from kvkeep.features import Lacks
from kvkeep.hf.cache_argument import NAMES, as_cache
from kvkeep.hf.config import ATTACHMENT, decoder_config, decoder_of
from kvkeep.hf.inputs import fed_by
from kvkeep.hf.kinds.base import Handle, Kind
from kvkeep.hf.kinds.multimodal import media_told, telling
from kvkeep.hf.kinds.windows import window_of
from kvkeep.hf.weightless import cheap_forwards, without_weights
from kvkeep.host import LayerKind
from kvkeep.layer.recurrent import LACKS, RecurrentStates, StateSpec

_HYBRID, _HYBRID_SLIDING = "hybrid", "hybrid_sliding"
"""The types of layers that attend and are recurrent."""

_ONLY = frozenset({"linear_attention", "conv"})
"""Those of layers that are recurrent only."""

_MASK = "attention_mask"
_TOKENS = ("input_ids", "inputs_embeds", "position_ids")
_SETTINGS = (*NAMES, "use_cache")


class Recurrent(Kind):
    """Some layers carry states from token to token."""

    lacks: ClassVar[Lacks] = LACKS

    def has(self, text: PreTrainedConfig) -> bool:
        return bool(_numbers(text))

    def types(self, text: PreTrainedConfig) -> Mapping[str, LayerKind | None]:
        attending = (LayerKind(_HYBRID, None), LayerKind(_HYBRID_SLIDING, window_of(text)))
        return {**dict.fromkeys(_ONLY), **{kind.name: kind for kind in attending}}

    def states(self, text: PreTrainedConfig) -> RecurrentStates:
        return TransformersStates(_numbers(text))

    def state_specs(self, model: PreTrainedModel) -> dict[str, StateSpec]:
        """Found by a forward of one token."""
        text, decoder = decoder_config(model.config), decoder_of(model)
        states, own = TransformersStates(_numbers(text)), DynamicCache(config=text)
        one = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
        with torch.no_grad():
            decoder(input_ids=one, use_cache=True, **as_cache(decoder, own))
        states.cache = own
        return states.specs

    def attach(self, model: PreTrainedModel) -> Sequence[Handle]:
        """Let layers that need it compute token by token wherever the cache holds a state."""
        decoder = decoder_of(model)
        return [_Routed(decoder.get_submodule(x)) for x in _layers_that_ignore_their_state(decoder)]

    def begin(self, cache: Any, decoder: PreTrainedModel, given: dict[str, Any]) -> None:
        """A forward that has no room must not change states."""
        tokens = fed_by(given)
        n = 0 if tokens is None else tokens.shape[1]
        cache.expect(n)
        if cache.layers[0].record_past:
            marked = cache.fed in cache.carried.marks
            cache.fed_since.add(decoder, given, cache.fed, marks=not marked)
            cache.mark()
        cache.carried.begin(cache.fed)
        if given.get("position_ids") is None and tokens is not None:
            # Bamba would count from 0 in every forward.
            place = torch.arange(cache.fed, cache.fed + n, device=tokens.device)
            given["position_ids"] = place[None]

    def end(self, cache: Any) -> None:
        cache.carried.end(cache.fed)


def _numbers(text: PreTrainedConfig) -> list[int]:
    """How many recurrent or convolutional states each layer of a model has: 0 if it only attends.
    Empty: no layer has any."""
    names = getattr(text, "layer_types", None) or []
    recurrent = _ONLY | {_HYBRID, _HYBRID_SLIDING}
    if recurrent.isdisjoint(names):
        return []
    own = getattr(text, "number_of_conv_states", 1)
    return [own if name in recurrent else 0 for name in names]


class TransformersStates(RecurrentStates):
    """Transformers' own cache layers for the recurrent and convolutional layers of a model.

    Args:
        numbers: for each layer of the model, how many states it has: 0 if it is attention only.
    """

    def __init__(self, numbers: Sequence[int]) -> None:
        super().__init__()
        self._numbers = tuple(numbers)
        self.places = frozenset(place for place, number in enumerate(numbers) if number)
        self.cache = self._new()

    def _new(self) -> transformers.Cache:
        return transformers.Cache(
            [LinearAttentionLayer(number_of_states=n) if n else DummyLayer() for n in self._numbers]
        )

    def empty(self) -> TransformersStates:
        """See `RecurrentStates.empty`."""
        return TransformersStates(self._numbers)

    def tensors(self) -> dict[str, Tensor]:
        """See `RecurrentStates.tensors`. A tensor's name is `layer.kind.number`."""
        return states_in(self.cache)

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """See `RecurrentStates.load`."""
        self.cache = self._new()
        for name, x in tensors.items():
            index, kind, number = name.split(".")
            layer: Any = self.cache.layers[int(index)]
            _held(layer)[kind][int(number)] = x
            layer.has_previous_state[int(number)] = True
            layer.dtype, layer.device = x.dtype, x.device
            if kind == "conv":
                layer.is_conv_states_initialized[int(number)] = True
                layer.conv_kernel_size[int(number)] = x.shape[-1]
            else:
                layer.is_recurrent_states_initialized[int(number)] = True


def states_in(cache: transformers.Cache) -> dict[str, Tensor]:
    """The states in a cache of transformers; see `TransformersStates.tensors`."""
    found: dict[str, Tensor] = {}
    layers: list[Any] = cache.layers
    for index, layer in enumerate(layers):
        for kind, held in _held(layer).items():
            for number, x in held.items():
                if x is not None and layer.has_previous_state[number]:
                    found[f"{index}.{kind}.{number}"] = x
    return found


class KeepsStates:
    """The methods by which a model's recurrent layers use a cache, as transformers calls them."""

    carried: RecurrentStates

    def _states(self) -> Any:
        if not isinstance(self.carried, TransformersStates):
            raise StateError(
                "a recurrent layer uses a cache that was built for a model without such layers; "
                "build it as kvkeep.Cache(model)"
            )
        return self.carried.cache

    def _states_to_change(self) -> Any:
        """The states, for a layer that may change what it is given in place."""
        self._require_running()
        states = self._states()
        self.carried.change()
        return states

    def _require_running(self) -> None:
        """Raise UnsupportedError if there are recurrent states, and no forward of an attached model
        has begun."""
        if self.carried and not self.carried.running:
            raise UnsupportedError(
                "this model has recurrent layers, whose states a cache keeps only for an attached "
                "model; call kvkeep.attach(model) first"
            )

    def get_conv_state(self, *args: Any, **kwargs: Any) -> Any:
        """A layer's convolution state, a tensor; None before the first token."""
        return self._states_to_change().get_conv_state(*args, **kwargs)

    def update_conv_state(self, *args: Any, **kwargs: Any) -> Any:
        """Extend a layer's convolution state; returns it with the new inputs, a tensor."""
        return self._states_to_change().update_conv_state(*args, **kwargs)

    def get_recurrent_state(self, *args: Any, **kwargs: Any) -> Any:
        """A layer's recurrent state, a tensor; None before the first token."""
        return self._states_to_change().get_recurrent_state(*args, **kwargs)

    def update_recurrent_state(self, *args: Any, **kwargs: Any) -> Any:
        """Replace a layer's recurrent state, a tensor, and return it."""
        return self._states_to_change().update_recurrent_state(*args, **kwargs)

    def has_previous_state(self, *args: Any, **kwargs: Any) -> Any:
        """Whether a layer has a state; without a layer, the last one that has states."""
        return self._states().has_previous_state(*args, **kwargs)

    def is_recording_past(self, layer_idx: int) -> bool:
        """False: states return to copies, see `RecurrentStates.mark`."""
        return False


def _held(layer: Any) -> dict[str, dict[int, Tensor | None]]:
    if not isinstance(layer, LinearAttentionCacheLayerMixin):
        return {}
    return {"conv": layer.conv_states, "recurrent": layer.recurrent_states}


@dataclass(frozen=True)
class _Forward:
    """A forward of a decoder: its arguments, what was told of it, and the columns fed before it, of
    which it adds those up to `stop`."""

    decoder: ref[PreTrainedModel]
    inputs: Mapping[str, Any]
    media: bool | None
    start: int
    stop: int

    def run(self, cache: Any) -> None:
        """Feed the first columns, up to `stop`, to the cache again."""
        decoder = self.decoder()
        assert decoder is not None  # see `Forwards.again`
        n = self.stop - self.start
        given = dict(self.inputs)
        for name in _TOKENS:
            if given.get(name) is not None:
                given[name] = given[name].narrow(1 if name != "position_ids" else -1, 0, n)
        if given.get(_MASK) is not None:
            given[_MASK] = given[_MASK][:, : self.stop]
        with telling(self.media):
            decoder(**given, **as_cache(decoder, cache), use_cache=True)


class Forwards:
    """The forwards of a cache since its last crop, in order."""

    def __init__(self) -> None:
        self._all: list[_Forward] = []
        self.marked: list[int] = []  # the columns before which states were marked for them

    def __bool__(self) -> bool:
        return bool(self._all)

    def add(
        self, decoder: PreTrainedModel, inputs: Mapping[str, Any], start: int, *, marks: bool
    ) -> None:
        """Record a forward before it runs. `marks`: the states before it are marked for it.

        Raises:
            UnsupportedError: its inputs cannot be divided by tokens.
        """
        given = {name: x for name, x in inputs.items() if name not in _SETTINGS}
        mask = given.get(_MASK)
        odd = [
            name
            for name, x in given.items()
            if isinstance(x, Tensor) and name not in (*_TOKENS, _MASK)
        ]
        if odd or not (mask is None or (isinstance(mask, Tensor) and mask.dim() == 2)):
            raise UnsupportedError(
                f"drafted tokens with {odd[0] if odd else _MASK} of their own: the accepted ones "
                "must be read again by recurrent layers, and this input cannot be divided; "
                "generate without drafts"
            )
        fed = fed_by(given)
        assert fed is not None
        self._all = [one for one in self._all if one.start < start]  # others were refused
        stop = start + fed.shape[1]
        self._all.append(_Forward(ref(decoder), given, media_told(), start, stop))
        if marks:
            self.marked.append(start)

    def again(self, columns: int, least: int) -> list[_Forward]:
        """The forwards from the last that began at `least` columns or later, or with the first
        column, up to `columns` columns.

        Raises:
            RollbackError: there is none.
            StateError: the model is not attached any more.
        """
        decoder = self._all[-1].decoder()
        if not hasattr(decoder, ATTACHMENT):
            raise StateError(
                "recurrent layers take drafts back by reading the accepted tokens again, and the "
                "model was detached or deleted since; call kvkeep.attach(model) again, or reset() "
                "the cache"
            )
        found: list[_Forward] = []
        for one in reversed(self._all):
            if one.start <= columns:
                found.insert(0, replace(one, stop=min(one.stop, columns)))
                if one.start >= least or not one.start:
                    return found
        raise RollbackError(
            f"crop to {columns} tokens, but those fed before {self._all[0].start} were kept for "
            "good by an earlier crop; reset() and feed the tokens again"
        )


class _Routed:
    """A layer that is given tokens one by one. It may have had a forward of its own, as accelerate
    gives modules, which moves weights to the device first."""

    def __init__(self, module: nn.Module) -> None:
        self._module, self._own = module, module.__dict__.get("forward")
        module.__dict__["forward"] = partial(_forward, module, self._own)

    def remove(self) -> None:
        """Undo it."""
        self._module.__dict__.pop("forward", None)
        if self._own is not None:
            self._module.__dict__["forward"] = self._own


def _forward(module: nn.Module, own: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
    """The layer's forward, (B, n, width) -> (B, n, width), one token at a time after the first
    chunk. `own`: see `_Routed`."""
    forward: Any = partial(type(module).forward, module) if own is None else own
    given = inspect.signature(forward).bind(hidden_states, *args, **kwargs).arguments
    given |= given.pop("kwargs", {})
    cache = next((x for x in given.values() if isinstance(x, KeepsStates)), None)
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
