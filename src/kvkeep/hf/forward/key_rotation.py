"""Finds, by trying, which layers of a transformers model rotate their keys, and how.

Configs do not say it: some models rotate only in layers with a sliding window. A token that is
alone in its text attends only to itself, so its keys at two positions differ only by the rotation.

A model without a rotary embedding may add positions to its embeddings. Then keys at two positions
differ, but not if layers are given the same hidden states.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from kvkeep.errors import UnsupportedError, reason_of
from kvkeep.hf.cache_argument import as_cache
from kvkeep.hf.config import decoder_config, decoder_of, layer_lists
from kvkeep.hf.forward.placing import placed, placing
from kvkeep.hf.kinds import kinds_of, layer_kinds, to_slots
from kvkeep.hf.weightless import cheap_forwards, without_weights
from kvkeep.rotary import Rotary

_AT, _RELATIVE = 3, 1e-4
_REMEDY = "use the policy snapkv or h2o instead, and a PrefixStore for texts"

_BASE = 10_000.0
"""The base of the frequencies of models whose config and buffers name none (GPT-J)."""

_known: WeakKeyDictionary[PreTrainedModel, tuple[str, list[Rotary | None]]] = WeakKeyDictionary()
"""For a decoder, its config as text, and how layers rotate their keys under that config."""


def as_applied(
    model: PreTrainedModel, rotaries: Sequence[Rotary | None] | None
) -> list[Rotary | None]:
    """The rotary embedding of each attention layer; None for a layer that does not rotate keys.

    Args:
        rotaries: the rotary embeddings found in the model's code, one for each attention layer;
            None: try all frequencies among the model's buffers.

    Raises:
        UnsupportedError: a layer's keys depend on their position in another way. Positions that
            a model adds to its embeddings are no such way.
    """
    decoder = decoder_of(model)
    described = str(decoder.config.to_dict())
    known = _known.get(decoder)
    if known is None or known[0] != described:
        known = _known[decoder] = described, _applied(decoder, rotaries)
    return known[1]


def _applied(
    decoder: PreTrainedModel, rotaries: Sequence[Rotary | None] | None
) -> list[Rotary | None]:
    kinds = layer_kinds(decoder.config)
    turns = rotaries is None or any(rotaries)
    try:
        with cheap_forwards():
            copied = without_weights(decoder)
            for module in copied.modules():
                placing(module)
            first, later = _keys_at(copied) if turns else _keys_of_same_states(copied)
    except MemoryError:
        raise
    except Exception as error:
        raise UnsupportedError(
            f"kvkeep cannot try how {decoder.config.model_type} rotates keys: "
            f"{type(error).__name__}: {reason_of(error)}; {_REMEDY}"
        ) from error
    tried: list[list[Rotary]] = (
        [_possible(decoder, kind.latent or 0) for kind in kinds]
        if rotaries is None
        else [[x] if x else [] for x in rotaries]
    )
    found: list[Rotary | None] = []
    for kind, some in zip(kinds, tried, strict=True):
        assert kind.place is not None
        if kind.counts:  # no keys
            found.append(None)
            continue
        (x, *behind), (y, *later_behind) = first[kind.place], later[kind.place]
        rotary = _found(decoder, kind.place, some, x, y)
        for one, other in zip(behind, later_behind, strict=True):
            index = _found(decoder, kind.place, _possible(decoder, 0), one, other)
            if index is not None:
                none = Rotary(torch.empty(0))
                rotary = replace(rotary or none, beside=replace(index, first=x.shape[-1]))
        found.append(rotary)
    return found


def _found(
    decoder: PreTrainedModel, place: int, some: Sequence[Rotary], x: Tensor, y: Tensor
) -> Rotary | None:
    """The rotary embedding, of `some`, that turns keys `x` of a layer to those at position `_AT`,
    `y`; None: they are the same.

    Raises:
        UnsupportedError: none does.
    """
    by, width = torch.tensor(_AT), x.shape[-1]
    fitting = (one for one in some if one.first + 2 * len(one.inv_freq) <= width)
    rotary = next((one for one in fitting if _alike(one.turn(x, by), y)), None)
    if rotary is None and not _alike(x, y):
        raise UnsupportedError(
            f"the keys of layer {place} of {decoder.config.model_type} depend on their position in "
            "another way than by its rotary embedding, so kvkeep cannot move keys or predict "
            f"queries; {_REMEDY}"
        )
    return rotary


def _possible(decoder: PreTrainedModel, first: int) -> list[Rotary]:
    """The rotary embeddings, from dimension `first` on, that a decoder's layers may apply: with all
    frequencies among its buffers."""
    text = decoder_config(decoder.config)
    some = [x for name, x in decoder.named_buffers() if name.endswith("inv_freq")]
    width = getattr(text, "rotary_dim", None)
    if width:
        some.append(_BASE ** -(torch.arange(0, width, 2) / width))
    return [
        Rotary(sign * x.detach().float().cpu(), interleaved, first)
        for x in some
        for interleaved in (False, True)
        for sign in (1.0, -1.0)
    ]


Keys = dict[int, list[Tensor]]
"""Keys (1, H, 1, D) of the slot of a text's last token, then the keys of an index behind them,
(1, 1, 1, D), by index of the layers that have keys."""


def _keys_at(decoder: PreTrainedModel) -> tuple[Keys, Keys]:
    """The keys of a token that is alone in its text, at position 0 and at position `_AT`."""

    def keys(at: int) -> Keys:
        place = torch.tensor([[at]])
        with placed(place):
            return _last_keys(decoder, 1, position_ids=place)

    return keys(0), keys(_AT)


def _keys_of_same_states(decoder: PreTrainedModel) -> tuple[Keys, Keys]:
    """The keys of a token at position 0; and at the end of a longer text, at position `_AT`, if
    each layer gets the first token's hidden state for it."""
    text = decoder_config(decoder.config)
    names = getattr(text, "layer_types", None)
    lists = layer_lists(decoder, text.num_hidden_layers if names is None else len(names))
    states = dict[nn.Module, Any]()

    def keep(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        states[layer] = args[0] if args else kwargs.get("hidden_states")

    def same(
        layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        hidden, rest = (args[0], args[1:]) if args else (kwargs.pop("hidden_states"), ())
        return (torch.cat([hidden[:, :-1], states[layer]], dim=1), *rest), kwargs

    hooks = [x.register_forward_pre_hook(keep, with_kwargs=True) for one in lists for x in one]
    alone = _last_keys(decoder, 1)
    for hook in hooks:
        hook.remove()
    layers = next((one for one in lists if states.keys() >= {*one}), None)
    if layers is None:
        raise UnsupportedError("it has no list of its layers")
    for layer in layers:
        layer.register_forward_pre_hook(same, with_kwargs=True)
    return alone, _last_keys(decoder, _AT + 1)


def _last_keys(decoder: PreTrainedModel, tokens: int, **given: Tensor) -> Keys:
    """The keys of the last token of a text, computed with a new cache."""
    cache = DynamicCache(config=decoder_config(decoder.config))
    ids = torch.ones(1, tokens, dtype=torch.int64)
    decoder(input_ids=ids, **given, **as_cache(decoder, cache), use_cache=True)
    kinds = kinds_of(decoder)
    layers: dict[int, Any] = dict(enumerate(cache.layers))
    found: Keys = {}
    for index, layer in layers.items():
        if getattr(layer, "keys", None) is not None:
            parts = [to_slots(kinds, layer.keys, layer.values)[0]]
            parts += [x for kind in kinds if (x := kind.behind(layer)) is not None]
            found[index] = [x[:, :, -1:] for x in parts]
    return found


def _alike(x: Tensor, y: Tensor) -> bool:
    return bool((x - y).abs().max() <= _RELATIVE * x.abs().max())
