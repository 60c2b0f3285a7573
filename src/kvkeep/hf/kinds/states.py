"""The states of recurrent layers, held in transformers' own cache layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import pad
from transformers.cache_utils import (
    DummyLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from kvkeep.errors import StateError, UnsupportedError
from kvkeep.layer.packed_states import PackedStates
from kvkeep.layer.recurrent import RecurrentStates


class TransformersStates(RecurrentStates):
    """transformers' own cache layers, for the recurrent and convolutional layers of a model.

    Args:
        numbers: the number of states of each layer of the model; 0: the layer only attends.
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

    def hold(self, tensors: Mapping[str, Tensor]) -> None:
        """See `RecurrentStates.hold`."""
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
    """The states in a transformers cache; see `TransformersStates.tensors`."""
    found: dict[str, Tensor] = {}
    layers: list[Any] = cache.layers
    for index, layer in enumerate(layers):
        for kind, held in _held(layer).items():
            for number, x in held.items():
                if x is not None and layer.has_previous_state[number]:
                    found[f"{index}.{kind}.{number}"] = x
    return found


class KeepsStates:
    """The methods of a cache that a model's recurrent layers use, under transformers' names."""

    carried: RecurrentStates
    packed_states = PackedStates()
    """The states of all sequences of a packed forward."""

    def _states(self) -> Any:
        if not isinstance(self.carried, TransformersStates):
            raise StateError(
                "a recurrent layer uses a cache that was built for a model without such layers; "
                "build it as kvkeep.Cache(model)"
            )
        return self.carried.cache

    def _states_to_change(self) -> Any:
        """The states, for a layer that may change them in place."""
        self._require_running()
        states = self._states()
        if not torch.compiler.is_compiling():  # a program's caller records changes itself
            self.carried.change()
        return states

    def _require_running(self) -> None:
        """Raise UnsupportedError if there are recurrent states, but no forward of an attached model
        has begun."""
        if self.carried and not self.carried.running:
            if torch.compiler.is_compiling():
                raise UnsupportedError(
                    "this model has recurrent layers, whose states torch.compile(model) does not "
                    "keep; call kvkeep.attach(model, compile=True), which compiles its steps"
                )
            raise UnsupportedError(
                "this model has recurrent layers, whose states a cache keeps only for an attached "
                "model; call kvkeep.attach(model) first"
            )

    def get_conv_state(self, *args: Any, **kwargs: Any) -> Any:
        """A layer's convolution state, a tensor; None before the first token."""
        return self._states_to_change().get_conv_state(*args, **kwargs)

    def update_conv_state(self, *args: Any, **kwargs: Any) -> Any:
        """Extend a layer's convolution state; returns the state and the new inputs as a tensor."""
        return self._states_to_change().update_conv_state(*args, **kwargs)

    def get_recurrent_state(self, *args: Any, **kwargs: Any) -> Any:
        """A layer's recurrent state, a tensor; None before the first token."""
        return self._states_to_change().get_recurrent_state(*args, **kwargs)

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Any:
        """Replace a layer's recurrent state, a tensor, and return it."""
        states = self._states_to_change()
        found = states.update_recurrent_state(recurrent_states, layer_idx, state_idx, **kwargs)
        if isinstance(states, transformers.Cache):
            # transformers sets this only with a convolution state, which not every layer has.
            layer: Any = states.layers[layer_idx]
            layer.has_previous_state[state_idx] = True
        return found

    def has_previous_state(self, *args: Any, **kwargs: Any) -> Any:
        """Whether a layer has a state; without an argument, the last layer with states."""
        return self._states().has_previous_state(*args, **kwargs)

    def is_recording_past(self, layer_idx: int) -> bool:
        """False: states return to copies, see `RecurrentStates.mark`."""
        return False


def _held(layer: Any) -> dict[str, dict[int, Tensor | None]]:
    if not isinstance(layer, LinearAttentionCacheLayerMixin):
        return {}
    return {"conv": layer.conv_states, "recurrent": layer.recurrent_states}


class StatesOf(KeepsStates):
    """A cache with states only, for a recurrent layer."""

    def __init__(self, carried: RecurrentStates) -> None:
        self.carried = carried


class PassedStates:
    """The states of one layer in one chunk, with the methods that a transformers layer uses.
    Tensors of the caller are never changed in place, so gradients pass. Within `saved`, the layer
    may change the tensors that it is given in place.

    Args:
        held: the states before the chunk by name; replaced by the states after the chunk.
    """

    def __init__(self, held: dict[str, Tensor]) -> None:
        self._held = held
        self._given: dict[int, Tensor] = {}  # tensors given to the layer, by address; kept alive

    def saved(self) -> AbstractContextManager[Any]:
        """A context in which autograd saves copies of tensors that the layer may change."""
        return saved_tensors_hooks(self._copied, lambda x: x)

    def _copied(self, x: Tensor) -> Tensor:
        return x.detach().clone() if _memory(x) in self._given else x

    def has_previous_state(self, *args: Any, **kwargs: Any) -> bool:
        """Whether there are states."""
        return bool(self._held)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """The convolution state, which the layer may change; None before the first token."""
        return self._own(f"conv.{state_idx}")

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """The recurrent state, which the layer may change; None before the first token."""
        return self._own(f"recurrent.{state_idx}")

    def _own(self, name: str) -> Tensor | None:
        if name in self._held:
            self._held[name] = own = self._held[name].clone()
            self._given[_memory(own)] = own
        return self._held.get(name)

    def update_conv_state(
        self,
        conv_states: Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **_: Any,
    ) -> Tensor:
        """Extend the convolution state by new inputs (B, ..., n); returns the state followed by the
        inputs."""
        name = f"conv.{state_idx}"
        before, whole = self._held.get(name), conv_states
        if before is None:
            width = conv_states.shape[-1] if conv_kernel_size is None else conv_kernel_size
            whole = pad(whole, (max(0, width - whole.shape[-1]), 0))
        else:
            width, whole = before.shape[-1], torch.cat([before, whole], dim=-1)
        self._held[name] = whole[..., -width:].clone()
        return whole

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> Tensor:
        """Replace the recurrent state."""
        name = f"recurrent.{state_idx}"
        before = self._held.get(name)
        new = recurrent_states if before is None else recurrent_states.to(before.dtype)
        self._held[name] = new.clone()
        return self._held[name]


def _memory(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()
