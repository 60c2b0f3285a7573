"""Finds, by trying, which layers of a transformers model rotate their keys, and how.

Configs do not say it: some models rotate only in layers with a sliding window. A token that is
alone in its text attends only to itself, so its keys at two positions differ only by the rotation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from kvkeep.errors import UnsupportedError, reason_of
from kvkeep.hf.cache_argument import as_cache
from kvkeep.hf.config import decoder_config, decoder_of
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
        UnsupportedError: a layer's keys depend on their position in another way.
    """
    if rotaries is not None and not any(rotaries):
        return list(rotaries)
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
    tried: list[list[Rotary]] = (
        [_possible(decoder, kind.latent or 0) for kind in kinds]
        if rotaries is None
        else [[x] if x else [] for x in rotaries]
    )
    try:
        with cheap_forwards():
            copied = without_weights(decoder)
            for module in copied.modules():
                placing(module)
            first, later = (_keys(copied, at) for at in (0, _AT))
    except MemoryError:
        raise
    except Exception as error:
        raise UnsupportedError(
            f"kvkeep cannot try how {decoder.config.model_type} rotates keys: "
            f"{type(error).__name__}: {reason_of(error)}; {_REMEDY}"
        ) from error
    found: list[Rotary | None] = []
    for kind, some in zip(kinds, tried, strict=True):
        assert kind.place is not None
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


def _keys(decoder: PreTrainedModel, at: int) -> dict[int, list[Tensor]]:
    """The keys (1, H, 1, D) of slots of a token at position `at`, then the keys of an index behind
    them, (1, 1, 1, D), by index of the layers that have keys."""
    cache = DynamicCache(config=decoder_config(decoder.config))
    one, place = torch.ones(1, 1, dtype=torch.int64), torch.tensor([[at]])
    with placed(place):
        decoder(input_ids=one, position_ids=place, **as_cache(decoder, cache), use_cache=True)
    kinds = kinds_of(decoder)
    layers: dict[int, Any] = dict(enumerate(cache.layers))
    found: dict[int, list[Tensor]] = {}
    for index, layer in layers.items():
        if getattr(layer, "keys", None) is not None:
            found[index] = [to_slots(kinds, layer.keys, layer.values)[0]]
            found[index] += [x for kind in kinds if (x := kind.behind(layer)) is not None]
    return found


def _alike(x: Tensor, y: Tensor) -> bool:
    return bool((x - y).abs().max() <= _RELATIVE * x.abs().max())
