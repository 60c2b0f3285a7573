"""Models with layers that do not attend but are recurrent or convolutional.

A cache holds transformers' own cache layers for the states. Rejected drafts are removed from slots
by truncation, but a state cannot be truncated: it returns to a copy from before the forward, and
the accepted tokens are fed again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar
from weakref import ref

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel

from kvkeep.errors import RollbackError, StateError, UnsupportedError
from kvkeep.features import Lacks
from kvkeep.hf.cache_argument import NAMES, as_cache
from kvkeep.hf.config import ATTACHMENT, decoder_config, decoder_of
from kvkeep.hf.inputs import fed_by
from kvkeep.hf.kinds.base import Handle, Kind, Replaced
from kvkeep.hf.kinds.looped import with_further_runs
from kvkeep.hf.kinds.multimodal import media_told, telling
from kvkeep.hf.kinds.recurrent_functions import hastened
from kvkeep.hf.kinds.recurrent_layers import Divided, recurrent_layers
from kvkeep.hf.kinds.states import TransformersStates
from kvkeep.hf.kinds.windows import window_of
from kvkeep.host import LayerKind
from kvkeep.layer.recurrent import LACKS, RecurrentStates, StateSpec

_HYBRID, _HYBRID_SLIDING = "hybrid", "hybrid_sliding"
"""The types of layers that are both recurrent and attend."""

_ONLY = frozenset({"linear_attention", "conv"})
"""The types of layers that are recurrent and do not attend."""

_MASK = "attention_mask"
_TOKENS = ("input_ids", "inputs_embeds", "position_ids")
_SETTINGS = (*NAMES, "use_cache")


class Recurrent(Kind):
    """Some layers carry states from token to token.

    Attributes:
        elsewhere: the types of models whose states a subclass keeps in another place.
    """

    lacks: ClassVar[Lacks] = LACKS
    elsewhere: ClassVar[set[str]] = set()

    def has(self, text: PreTrainedConfig) -> bool:
        return bool(self.numbers(text)) and text.model_type not in self.elsewhere

    def types(self, text: PreTrainedConfig) -> Mapping[str, LayerKind | None]:
        attending = (LayerKind(_HYBRID, None), LayerKind(_HYBRID_SLIDING, window_of(text)))
        return {**dict.fromkeys(_ONLY), **{kind.name: kind for kind in attending}}

    def numbers(self, text: PreTrainedConfig) -> list[int]:
        """The number of recurrent or convolutional states of each layer; empty: none has any."""
        names = getattr(text, "layer_types", None) or []
        recurrent = _ONLY | {_HYBRID, _HYBRID_SLIDING}
        if recurrent.isdisjoint(names):
            return []
        own = getattr(text, "number_of_conv_states", 1)
        return with_further_runs(text, [own if name in recurrent else 0 for name in names])

    def states(self, text: PreTrainedConfig) -> RecurrentStates:
        return TransformersStates(self.numbers(text))

    def state_specs(self, model: PreTrainedModel) -> dict[str, StateSpec]:
        """Found by a forward of one token."""
        text, decoder = decoder_config(model.config), decoder_of(model)
        states, own = TransformersStates(self.numbers(text)), DynamicCache(config=text)
        one = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
        with torch.no_grad():
            decoder(input_ids=one, use_cache=True, **as_cache(decoder, own))
        states.cache = own
        return states.specs

    def attach(self, model: PreTrainedModel) -> Sequence[Handle]:
        """Let recurrent layers use faster functions on the CPU, divide packed forwards, and compute
        token by token if the cache holds a state, where the layer's own forward requires it."""
        decoder = decoder_of(model)
        paths, tokens = recurrent_layers(decoder)
        layers = [decoder.get_submodule(path) for path in paths]
        divided = [Divided(layer, layer.layer_idx if tokens else None) for layer in layers]
        forwards = [(module, hastened(module)) for module in decoder.modules()]
        return [*divided, *(Replaced(x, "forward", own) for x, own in forwards if own is not None)]

    def unpackable(self, changes: Sequence[Handle]) -> str:
        if any(isinstance(change, Divided) for change in changes):
            return ""
        return "has recurrent layers that also attend"

    def begin(self, cache: Any, decoder: PreTrainedModel, given: dict[str, Any]) -> None:
        """Check that the cache has room before the forward changes states, and mark them for
        drafts."""
        tokens = fed_by(given)
        n = 0 if tokens is None else tokens.shape[1]
        cache.expect(n)
        if cache.layers[0].record_past:
            marked = cache.fed in cache.carried.marks
            cache.fed_since.add(decoder, given, cache.fed, marks=not marked)
            cache.mark()
        cache.carried.begin(cache.fed)
        if tokens is not None:
            self.place(given, tokens, cache.fed)

    def place(self, given: dict[str, Any], tokens: Tensor, fed: int) -> None:
        """Needed for Bamba, which counts from 0 in every forward."""
        if given.get("position_ids") is None:
            columns = torch.arange(fed, fed + tokens.shape[1], device=tokens.device)
            given["position_ids"] = columns[None]

    def begin_in_graph(self, cache: Any, given: dict[str, Any]) -> None:
        tokens = fed_by(given)
        if given.get("position_ids") is None and tokens is not None:
            place = cache.tickets[0].next_positions(tokens.shape[1], tokens.device)
            given["position_ids"] = place.to(torch.int64)

    def end(self, cache: Any) -> None:
        cache.carried.end(cache.fed)


@dataclass(frozen=True)
class _Forward:
    """A forward of a decoder that can be repeated.

    Args:
        decoder: the decoder.
        inputs: the forward's arguments.
        media: the result of `media_told` in the forward.
        start, stop: number of columns fed before and after it.
    """

    decoder: ref[PreTrainedModel]
    inputs: Mapping[str, Any]
    media: bool | None
    start: int
    stop: int

    def run(self, cache: Any) -> None:
        """Feed the columns from `start` to `stop` to the cache again."""
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
        self.marked: list[int] = []  # numbers of columns after which states were marked for them

    def __bool__(self) -> bool:
        return bool(self._all)

    def add(
        self, decoder: PreTrainedModel, inputs: Mapping[str, Any], start: int, *, marks: bool
    ) -> None:
        """Record a forward before it runs. `marks`: whether states are marked just for it.

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
                f"drafted tokens with {odd[0] if odd else _MASK}: recurrent layers must read "
                "accepted tokens again, but this input cannot be divided by tokens; generate "
                "without drafts"
            )
        fed = fed_by(given)
        assert fed is not None
        self._all = [one for one in self._all if one.start < start]  # drop refused forwards
        stop = start + fed.shape[1]
        self._all.append(_Forward(ref(decoder), given, media_told(), start, stop))
        if marks:
            self.marked.append(start)

    def again(self, columns: int, least: int) -> list[_Forward]:
        """The forwards to repeat, cut at `columns` columns, so that a cache gets to this point:
        from the last one that began after at least `least` columns, or with an empty cache.

        Raises:
            RollbackError: no forward began there.
            StateError: the model is no longer attached.
        """
        decoder = self._all[-1].decoder()
        if not hasattr(decoder, ATTACHMENT):
            raise StateError(
                "recurrent layers remove drafts by reading the accepted tokens again, but the "
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
            f"crop to {columns} tokens, but an earlier crop made the first {self._all[0].start} "
            "tokens certain; reset() and feed the tokens again"
        )
