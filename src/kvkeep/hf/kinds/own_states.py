"""Models that do not keep the states of recurrent layers in transformers' caches: MiniMax has a
cache of its own class, RecurrentGemma keeps states in its modules. While such a model is attached,
its layers read states from a kvkeep cache and write them back to it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial, update_wrapper
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from kvkeep.hf.cache_argument import cache_in
from kvkeep.hf.config import decoder_of
from kvkeep.hf.inputs import fed_by
from kvkeep.hf.kinds.base import Handle, Replaced
from kvkeep.hf.kinds.recurrent import Recurrent
from kvkeep.hf.kinds.recurrent_layers import Divided, cache_among, changed
from kvkeep.hf.kinds.states import KeepsStates
from kvkeep.layer.recurrent import StateSpec


class _OwnStates(Recurrent, ABC):
    """A model type whose recurrent layers do not keep states in transformers' caches.

    Attributes:
        model_type: its name in configs.
        tokens: whether layers use a state only for a single token.
        number: number of states of a recurrent layer.
    """

    model_type: str
    tokens: bool
    number: int

    def __init_subclass__(cls) -> None:
        Recurrent.elsewhere.add(cls.model_type)

    def has(self, text: PreTrainedConfig) -> bool:
        return text.model_type == self.model_type

    def numbers(self, text: PreTrainedConfig) -> list[int]:
        return [self.number * n for n in super().numbers(text)]

    def attach(self, model: PreTrainedModel) -> Sequence[Handle]:
        """Let recurrent layers use a kvkeep cache, and divide their forwards; see `Recurrent`."""
        changes: list[Handle] = []
        for place, module in self.layers(decoder_of(model)):
            forward = partial(self.run, module.forward, module, place)
            changes.append(Replaced(module, "forward", forward))
            changes.append(Divided(module, place if self.tokens else None))
        return changes

    def layers(self, decoder: PreTrainedModel) -> Iterator[tuple[int, Any]]:
        """The recurrent layers of a decoder, each after its index among all layers."""
        layers: Any = decoder.layers
        for place, layer in enumerate(layers):
            for module in layer.children():
                if self.is_recurrent(module):
                    yield place, module

    @abstractmethod
    def is_recurrent(self, module: nn.Module) -> bool:
        """Whether a module is a recurrent layer."""

    @abstractmethod
    def run(self, own: Any, module: Any, place: int, *args: Any, **kwargs: Any) -> Any:
        """The forward of a recurrent layer, with states from the kvkeep cache among its arguments;
        with another cache, or without a cache, its own forward `own`."""


class _LightningStates(NamedTuple):
    """The states of a kvkeep cache, under the names that MiniMax's layers use."""

    cache: KeepsStates

    def get_linear_cache(self, place: int) -> Tensor | None:
        """A layer's state (B, H, D, D); None before the first token."""
        state: Tensor | None = self.cache.get_recurrent_state(place)
        return state

    def set_linear_cache(self, place: int, state: Tensor) -> None:
        """Replace a layer's state."""
        self.cache.update_recurrent_state(state, place)


class Lightning(_OwnStates):
    """MiniMax: layers of lightning attention. The decoder refuses a cache of another class, unless
    `use_cache` is False; its layers use any cache that they are given."""

    model_type, tokens, number = "minimax", False, 1

    def attach(self, model: PreTrainedModel) -> Sequence[Handle]:
        decoder = decoder_of(model)
        own = decoder.forward
        untold = update_wrapper(partial(_untold, own), own)  # its signature is read
        return [*super().attach(model), Replaced(decoder, "forward", untold)]

    def state_specs(self, model: PreTrainedModel) -> dict[str, StateSpec]:
        """Found by a forward of one token, which creates a cache of the model's own class."""
        decoder = decoder_of(model)
        one = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
        found: dict[int, Tensor] = {}

        def note(place: int, module: nn.Module, args: Any, output: tuple[Tensor, Tensor]) -> None:
            found[place] = output[1]

        with ExitStack() as hooks, torch.no_grad():
            for place, module in self.layers(decoder):
                hooks.enter_context(module.register_forward_hook(partial(note, place)))
            decoder(input_ids=one, use_cache=False)
        return {
            f"{place}.recurrent.0": StateSpec(tuple(x.shape[1:]), x.dtype, x.device)
            for place, x in found.items()
        }

    def is_recurrent(self, module: nn.Module) -> bool:
        return hasattr(module, "slope_rate")

    def run(self, own: Any, module: Any, place: int, *args: Any, **kwargs: Any) -> Any:
        if cache_among(args, kwargs) is None:
            return own(*args, **kwargs)

        def seen(x: Any) -> Any:
            return _LightningStates(x) if isinstance(x, KeepsStates) else x

        args, kwargs = changed((args, kwargs), seen)
        return own(*args, **kwargs)[0], None  # the returned state is not used


def _untold(own: Any, *args: Any, **kwargs: Any) -> Any:
    """A decoder's forward, with `use_cache=False` if a kvkeep cache is among its arguments."""
    told = {"use_cache": False} if isinstance(cache_in(kwargs), KeepsStates) else {}
    return own(*args, **kwargs | told)


class Griffin(_OwnStates):
    """RecurrentGemma: recurrent blocks, whose modules hold the states of the text read last."""

    model_type, tokens, number = "recurrent_gemma", True, 2
    returns_cache: ClassVar[bool] = False

    def begin(self, cache: Any, decoder: PreTrainedModel, given: dict[str, Any]) -> None:
        super().begin(cache, decoder, given)
        tokens, place = fed_by(given), given.get("position_ids")
        if tokens is not None and place is not None:  # one row of positions stands for all
            given["position_ids"] = place.expand(len(tokens), -1)

    def state_specs(self, model: PreTrainedModel) -> dict[str, StateSpec]:
        """Computed from the sizes of the modules."""
        found: dict[str, StateSpec] = {}
        for place, block in self.layers(decoder_of(model)):
            weight = block.conv_1d.weight
            width, kept = block.lru_width, block.conv1d_width - 1
            found[f"{place}.recurrent.0"] = StateSpec((width,), torch.float32, weight.device)
            found[f"{place}.recurrent.1"] = StateSpec((width, kept), weight.dtype, weight.device)
        return found

    def is_recurrent(self, module: nn.Module) -> bool:
        return hasattr(module, "rg_lru")

    def run(self, own: Any, module: Any, place: int, *args: Any, **kwargs: Any) -> Any:
        cache = cache_among(args, kwargs)
        if cache is None:
            return own(*args, **kwargs)
        with _apart(module):
            module.rg_lru.recurrent_states = cache.get_recurrent_state(place)
            module.conv1d_state = cache.get_recurrent_state(place, 1)
            found = own(*args, **kwargs)
            cache.update_recurrent_state(module.rg_lru.recurrent_states, place)
            cache.update_recurrent_state(module.conv1d_state, place, 1)
        return found


@contextmanager
def _apart(block: Any) -> Iterator[None]:
    """A context after which a recurrent block's modules hold the same states as before."""
    held = block.conv1d_state, block.rg_lru.recurrent_states
    try:
        yield
    finally:
        block.conv1d_state, block.rg_lru.recurrent_states = held
