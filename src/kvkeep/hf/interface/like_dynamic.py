"""Members that a kvkeep cache shares with transformers' DynamicCache, and how it continues one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Self

import torch
import transformers
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from kvkeep.errors import ShapeError, UnsupportedError
from kvkeep.features import Feature
from kvkeep.hf.interface.model_layers import ModelLayers
from kvkeep.hf.kinds import from_slots, states_in, to_slots
from kvkeep.hf.kinds.base import Kind
from kvkeep.hf.kinds.multimodal import shares_positions
from kvkeep.host import LayerKind, Specs
from kvkeep.host.cache import DEFAULT_SPEC
from kvkeep.layer.beginning import begin_with_tokens, check_tokens
from kvkeep.layer.layer import LayerCache
from kvkeep.layer.recurrent import RecurrentStates

Pairs = Iterable[Sequence[Tensor | None]]
"""For each layer, its keys and values (B, H, n, D); further elements are ignored."""


class LikeDynamic:
    """The members of `Cache` that code for a `DynamicCache` uses, and conversion from it."""

    config: PreTrainedConfig
    layers: list[LayerCache]
    carried: RecurrentStates
    _layers: list[LayerCache]
    _kinds: list[LayerKind]
    model_layers: ModelLayers
    kinds: tuple[Kind, ...]

    def __len__(self) -> int:
        """Number of layers of the model, including layers that do not attend; `layers` has only
        attention layers."""
        return max(int(self.config.num_hidden_layers), len(self._layers))

    def __iter__(self) -> Iterator[tuple[Tensor | None, Tensor | None, Tensor | None]]:
        """For each layer of the model, its keys and values, (B, H, S, D), and its sliding window,
        int64 (), like a `DynamicCache`; None for each that the layer lacks."""
        for place in range(len(self)):
            index = self.model_layers.indices.get(place)
            held = None if index is None else self.layers[index].held()
            window = None if index is None else self._kinds[index].window
            size = None if window is None else torch.tensor(window)
            if held is None:
                yield None, None, size
            else:
                yield *from_slots(self.kinds, held.keys, held.values), size

    @classmethod
    def from_dynamic(
        cls,
        model: PreTrainedModel,
        cache: DynamicCache | Pairs,
        spec: Specs = DEFAULT_SPEC,
        *,
        attention_mask: Tensor | None = None,
        capacity: int | None = None,
    ) -> Self:
        """A cache that continues a `DynamicCache`, or keys and values computed elsewhere.

        Keys and values are copied, and count as one chunk that was just fed: the next forward sees
        all of them, and then the policy evicts down to its budget. Stores and `compress` refuse
        such a cache, because they do not know its tokens.

        Args:
            model: the model, attached or not.
            cache: a `DynamicCache` that the model filled; or keys and values (B, H, n, D), rotated
                for the positions 0, 1, 2, ..., for each layer of the model, or for each attention
                layer. A layer with a sliding window may have its newest tokens only.
            spec, capacity: see the class.
            attention_mask: the mask (B, n) of the tokens, if rows are padded on the left.

        Raises:
            ShapeError: the shapes of keys, values and mask disagree, or a layer lacks tokens that
                the next token sees.
            UnsupportedError: `cache` is of another class, or holds images whose tokens share
                positions; or pairs are given for a model with recurrent layers.
        """
        if shares_positions(model):
            raise UnsupportedError(
                f"{type(model).__name__} has images whose tokens share positions, which cannot be "
                "found from keys and values; feed the tokens to kvkeep.Cache(model)"
            )
        build: Any = cls
        made: Self = build(model, spec, capacity=capacity)
        made.begin_with(cache, attention_mask)
        return made

    def begin_with(self, cache: Any, mask: Tensor | None = None) -> None:
        """Make this empty cache continue another cache, as `from_dynamic` does."""
        given = self._pairs_of(cache)
        for one, layer in zip(given, self.layers, strict=True):
            check_tokens(layer, *one)
        rows = {len(one.keys) for one in given}
        if len(rows) > 1:
            raise ShapeError(f"layers have keys of {sorted(rows)} rows; give equally many rows")
        columns = _columns(cache, given, self._kinds, mask)
        real = None if mask is None else _checked_mask(mask, len(given[0].keys), columns)
        for one, kind in zip(given, self._kinds, strict=True):
            held = one.keys.shape[2]
            least = columns if kind.window is None else min(columns, kind.window - 1)
            if not least <= held <= columns:
                raise ShapeError(
                    f"layer {kind.place} has {held} tokens of {columns}; give "
                    + (f"{columns}" if least == columns else f"at least the newest {least}")
                )
        for one, layer in zip(given, self.layers, strict=True):
            begin_with_tokens(layer, *one, columns, real)
        if self.carried:
            self.carried.restore(states_in(cache), columns)

    def _pairs_of(self, cache: Any) -> list[_Pair]:
        """The keys and values of each attention layer."""
        own = (kind.lacks for kind in self.kinds if not kind.states(self.config))
        if reason := next((x[Feature.PAIRS] for x in own if Feature.PAIRS in x), ""):
            raise UnsupportedError(f"{self.config.model_type} {reason}; feed the text again")
        if isinstance(cache, DynamicCache):
            listed = [(getattr(x, "keys", None), getattr(x, "values", None)) for x in cache.layers]
        elif lacking := self.carried.lacks.get(Feature.PAIRS):
            raise UnsupportedError(
                f"{self.config.model_type} {lacking}; give the DynamicCache that the model filled"
            )
        elif isinstance(cache, Iterable) and not isinstance(cache, Tensor | transformers.Cache):
            listed = [tuple(pair) for pair in cache]
        else:
            raise UnsupportedError(
                f"a cache made of a {type(cache).__name__}; give a DynamicCache, or the keys and "
                "values of each layer"
            )
        if len(listed) == len(self):
            listed = [listed[place] for place in self.model_layers.indices if place is not None]
        found = [
            _Pair(*to_slots(self.kinds, k, v))
            for k, v, *_ in ((*pair, None, None) for pair in listed)
            if isinstance(k, Tensor) and isinstance(v, Tensor) and k.numel()
        ]
        if len(found) != len(self.layers):
            raise ShapeError(
                f"keys and values of {len(found)} layers for a model in which {len(self.layers)} "
                f"of {len(self)} layers attend; give keys and values of each of these"
            )
        return found


class _Pair(NamedTuple):
    keys: Tensor
    values: Tensor


def _columns(
    cache: Any, given: Sequence[_Pair], kinds: Sequence[LayerKind], mask: Tensor | None
) -> int:
    """The number of columns that were fed."""
    if isinstance(cache, DynamicCache):
        attending = [layer for layer in cache.layers if isinstance(layer, CacheLayerMixin)]
        return max(int(layer.get_seq_length()) for layer in attending)
    if mask is not None:
        return int(mask.shape[-1])
    held = [(one.keys.shape[2], kind.window) for one, kind in zip(given, kinds, strict=True)]
    most = max(n for n, _ in held)
    if all(window is not None and n >= window - 1 for n, window in held):
        raise ShapeError(
            f"all layers have sliding windows, so more than the {most} tokens with keys may have "
            "been fed; give attention_mask, (B, n), with a column for each token that was fed"
        )
    return most


def _checked_mask(mask: Tensor, rows: int, columns: int) -> Tensor | None:
    """The mask as bool; None if it shows all columns."""
    real = mask.bool()
    if real.shape != (rows, columns):
        raise ShapeError(
            f"attention mask {tuple(mask.shape)} for {rows} rows of {columns} tokens; give "
            f"({rows}, {columns})"
        )
    if bool((real[:, :-1] & ~real[:, 1:]).any()) or not bool(real[:, -1].all()):
        raise ShapeError(
            "an attention mask with padding between or behind tokens; a cache can continue only "
            "rows that are padded on the left"
        )
    return None if bool(real.all()) else real
