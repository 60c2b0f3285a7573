"""Try which layers of a transformers model rotate their keys, and whether as its code was read.

Configs do not say it: some models rotate in layers with a sliding window only. A token that is
alone in its text attends to itself, so its keys at two positions differ by the rotation only.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from kvkeep.errors import UnsupportedError
from kvkeep.hf.cache_argument import as_cache
from kvkeep.hf.config import decoder_config, decoder_of
from kvkeep.hf.kinds import layer_kinds
from kvkeep.hf.weightless import cheap_forwards, without_weights
from kvkeep.rotary import Rotary

_AT, _RELATIVE = 3, 1e-4
_REMEDY = "use the policy snapkv or h2o instead, and a PrefixStore for texts"

_known: WeakKeyDictionary[PreTrainedModel, tuple[str, list[bool]]] = WeakKeyDictionary()
"""Which layers rotate their keys, and the config with which that was found."""


def as_applied(model: PreTrainedModel, rotaries: Sequence[Rotary | None]) -> list[Rotary | None]:
    """The rotary embeddings of a model's layers, without those that a layer does not apply.

    Args:
        rotaries: those that were found in the model's code, for each layer that attends.

    Raises:
        UnsupportedError: a layer changes its keys with their position in another way.
    """
    if not any(rotaries):
        return list(rotaries)
    decoder = decoder_of(model)
    described = str(decoder.config.to_dict())
    known = _known.get(decoder)
    if known is None or known[0] != described:
        known = _known[decoder] = described, _applied(decoder, rotaries)
    return [rotary if used else None for rotary, used in zip(rotaries, known[1], strict=True)]


def _applied(decoder: PreTrainedModel, rotaries: Sequence[Rotary | None]) -> list[bool]:
    places = [kind.place for kind in layer_kinds(decoder.config)]
    try:
        with cheap_forwards():
            copied = without_weights(decoder)
            first, later = (_keys(copied, at) for at in (0, _AT))
    except MemoryError:
        raise
    except Exception as error:
        raise UnsupportedError(
            f"kvkeep cannot try how {decoder.config.model_type} rotates keys: "
            f"{type(error).__name__}: {' '.join(str(error).split())[:200]}; {_REMEDY}"
        ) from error
    found = []
    for place, rotary in zip(places, rotaries, strict=True):
        assert place is not None
        x, y = first[place], later[place]
        if rotary is not None and _alike(rotary.turn(x, torch.tensor(_AT)), y):
            found.append(True)
        elif _alike(x, y):
            found.append(False)
        else:
            raise UnsupportedError(
                f"layer {place} of {decoder.config.model_type} changes its keys with their "
                "position otherwise than by its rotary embedding, which is needed to move them "
                f"and to predict queries; {_REMEDY}"
            )
    return found


def _keys(decoder: PreTrainedModel, at: int) -> dict[int, Tensor]:
    """The keys (1, H, 1, D) of a token at a position, in each layer that has some."""
    cache = DynamicCache(config=decoder_config(decoder.config))
    one, place = torch.ones(1, 1, dtype=torch.int64), torch.tensor([[at]])
    decoder(input_ids=one, position_ids=place, **as_cache(decoder, cache), use_cache=True)
    found = ((place, getattr(layer, "keys", None)) for place, layer in enumerate(cache.layers))
    return {place: keys for place, keys in found if keys is not None}


def _alike(x: Tensor, y: Tensor) -> bool:
    return bool((x - y).abs().max() <= _RELATIVE * x.abs().max())
