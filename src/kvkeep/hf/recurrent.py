"""The states of a transformers model's layers that are not attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import transformers
from torch import Tensor
from transformers.cache_utils import (
    DummyLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from kvkeep.errors import StateError, UnsupportedError
from kvkeep.layer.recurrent import RecurrentStates


class TransformersStates(RecurrentStates):
    """Transformers' own cache layers for the recurrent and convolutional layers of a model.

    Args:
        numbers: for each layer of the model, how many states it has: 0 if it is attention only.
    """

    def __init__(self, numbers: Sequence[int]) -> None:
        super().__init__()
        self._numbers = tuple(numbers)
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
            _kinds(layer)[kind][int(number)] = x
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
        for kind, held in _kinds(layer).items():
            for number, x in held.items():
                if x is not None and layer.has_previous_state[number]:
                    found[f"{index}.{kind}.{number}"] = x
    return found


class KeepsStates:
    """The methods by which a model's recurrent layers use a cache, as transformers calls them."""

    recurrent: RecurrentStates | None

    def _states(self) -> Any:
        if not isinstance(self.recurrent, TransformersStates):
            raise StateError(
                "a recurrent layer uses a cache that was built for a model without such layers; "
                "build it as kvkeep.Cache(model)"
            )
        return self.recurrent.cache

    def _states_to_change(self) -> Any:
        """The states, for a layer that may change what it is given in place."""
        self._require_running()
        states = self._states()
        if self.recurrent is not None:
            self.recurrent.change()
        return states

    def _require_running(self) -> None:
        """Raise UnsupportedError if there are recurrent states, and no forward of an attached model
        has begun."""
        if self.recurrent is not None and not self.recurrent.running:
            raise UnsupportedError(
                "this model has recurrent layers, whose states a cache keeps only for an attached "
                "model; call kvkeep.attach(model) first"
            )

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """A layer's convolution state; None before the first token."""
        state: Tensor | None = self._states_to_change().get_conv_state(layer_idx, state_idx)
        return state

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        """Extend a layer's convolution state; returns it with the new inputs."""
        state: Tensor = self._states_to_change().update_conv_state(
            conv_states, layer_idx, state_idx, **kwargs
        )
        return state

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """A layer's recurrent state; None before the first token."""
        state: Tensor | None = self._states_to_change().get_recurrent_state(layer_idx, state_idx)
        return state

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        """Replace a layer's recurrent state, and return it."""
        state: Tensor = self._states_to_change().update_recurrent_state(
            recurrent_states, layer_idx, state_idx, **kwargs
        )
        return state

    def has_previous_state(
        self, layer_idx: int | None = None, state_idx: int | None = None
    ) -> bool:
        """Whether a layer has a state; None: the last layer that has states."""
        found: bool = self._states().has_previous_state(layer_idx, state_idx)
        return found

    def is_recording_past(self, layer_idx: int) -> bool:
        """False: states return to copies, see `RecurrentStates.mark`."""
        return False


def _kinds(layer: Any) -> dict[str, dict[int, Tensor | None]]:
    if not isinstance(layer, LinearAttentionCacheLayerMixin):
        return {}
    return {"conv": layer.conv_states, "recurrent": layer.recurrent_states}
