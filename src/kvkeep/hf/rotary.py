"""Find the rotary embeddings of a transformers model in its own code."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import AutoModel, DynamicCache, PreTrainedConfig, PreTrainedModel

from kvkeep.errors import UnsupportedError, reason_of
from kvkeep.hf.cache_argument import as_cache
from kvkeep.hf.config import decoder_config, decoder_of
from kvkeep.hf.kinds import layer_kinds
from kvkeep.hf.weightless import cheap_forwards, without_weights
from kvkeep.rotary import Rotary


def rotaries_of(config: PreTrainedConfig) -> list[Rotary | None]:
    """The rotary embedding of each layer of the model with this config; None for layers without.

    Raises:
        UnsupportedError: a layer has one that cannot be found in the model's code.
    """
    text = decoder_config(config)
    names = [kind.name for kind in layer_kinds(config)]
    # Despite its name, the list has 1 for the layers with a rotary embedding.
    used: Sequence[int] = getattr(text, "no_rope_layers", None) or [1] * len(names)
    by_name = _by_name(text, set(names))
    return [by_name[name] if uses else None for name, uses in zip(names, used, strict=True)]


def _by_name(text: PreTrainedConfig, names: set[str]) -> dict[str, Rotary | None]:
    """The rotary embedding of each type of layer."""
    module = _code(text)
    turning = _turning(module)
    classes = [
        found
        for name, found in vars(module).items()
        if name.endswith("RotaryEmbedding") and "Vision" not in name
    ]
    if turning is None and not classes:
        return dict.fromkeys(names)
    embedding = classes[0](text) if turning is not None and len(classes) == 1 else None
    rope = getattr(text, "rope_parameters", None) or {}
    found: dict[str, Rotary | None] = {}
    for name in sorted(names):
        own = rope.get(name, rope)  # parameters for all layers, or for each type of layer
        if own is None:
            found[name] = None
            continue
        shared = getattr(embedding, "inv_freq", None)
        inv_freq = getattr(embedding, f"{name}_inv_freq", shared)
        changing = own.get("rope_type") in ("dynamic", "longrope")  # depends on the text's length
        if turning is None or inv_freq is None or changing:
            raise _unknown(
                f"kvkeep cannot find the rotary embedding of {text.model_type} in layers of type "
                f"{name}"
            )
        # The first element of the result is the one paired with the first, and negative, unless
        # the model turns the other way.
        paired = turning(torch.tensor([1.0, 2.0, 3.0, 4.0])).flatten().tolist()[0]
        turned = inv_freq.float() * (1.0 if paired < 0 else -1.0)
        rotary = found[name] = Rotary(turned, interleaved=abs(paired) == 2.0)
        if own.get("mrope_section") and not _turns_alike(module, embedding, rotary):
            raise _unknown(f"kvkeep does not know how {text.model_type} rotates keys")
    return found


def _unknown(what: str) -> UnsupportedError:
    return UnsupportedError(
        f"{what}, which is needed to move keys and to predict queries; use the policy snapkv or "
        "h2o instead, and a PrefixStore for texts"
    )


def _turning(module: ModuleType) -> Callable[[Tensor], Tensor] | None:
    """The function that exchanges the halves or the neighbours of what a text's attention rotates;
    a model may have another one for images."""
    code = getattr(getattr(module, "apply_rotary_pos_emb", None), "__code__", None)
    called = [name for name in getattr(code, "co_names", ()) if name.startswith("rotate_")]
    names = (*called, "rotate_half", "rotate_every_two")
    return next((getattr(module, name) for name in names if hasattr(module, name)), None)


def _turns_alike(module: ModuleType, embedding: Any, rotary: Rotary) -> bool:
    """Whether the model's own code rotates as `rotary` does, up to a factor, if all three parts of
    a position are equal."""
    width, at = 2 * len(rotary.inv_freq), 3
    x = torch.linspace(1.0, 2.0, width)[None, None, None]
    cos, sin = embedding(x, torch.full((3, 1, 1), at))
    found = module.apply_rotary_pos_emb(x, x, cos, sin)[0].flatten()
    expected = rotary.turn(x, torch.tensor(at)).flatten()
    return bool(torch.allclose(found / found.norm(), expected / expected.norm(), atol=1e-5))


def _code(config: PreTrainedConfig) -> ModuleType:
    """The Python module that defines the model of this config."""
    mapping: Any = AutoModel._model_mapping
    if type(config) in mapping:
        model = mapping[type(config)]
        return sys.modules[(model[0] if isinstance(model, tuple) else model).__module__]
    name = type(config).__module__.replace("configuration_", "modeling_")  # a part of a model
    if name not in sys.modules:
        raise UnsupportedError(
            f"kvkeep cannot find the code of {config.model_type}, which says how keys are rotated; "
            "load the model first"
        )
    return sys.modules[name]


_AT, _RELATIVE = 3, 1e-4

_known: WeakKeyDictionary[PreTrainedModel, tuple[str, list[bool]]] = WeakKeyDictionary()
"""For each decoder: its config as text, and whether each layer rotates its keys."""


def as_applied(model: PreTrainedModel, rotaries: Sequence[Rotary | None]) -> list[Rotary | None]:
    """The rotary embeddings of a model's layers; None for each layer that does not apply its own.

    Args:
        rotaries: the rotary embeddings in the model's code, one for each layer that attends.

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
        raise _unknown(
            f"kvkeep cannot try how {decoder.config.model_type} rotates keys "
            f"({type(error).__name__}: {reason_of(error)})"
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
            raise _unknown(
                f"layer {place} of {decoder.config.model_type} changes its keys with their "
                "position otherwise than by its rotary embedding"
            )
    return found


def _keys(decoder: PreTrainedModel, at: int) -> dict[int, Tensor]:
    """The keys (1, H, 1, D) of a token at a position, by layer. Layers without keys are absent."""
    cache = DynamicCache(config=decoder_config(decoder.config))
    one, place = torch.ones(1, 1, dtype=torch.int64), torch.tensor([[at]])
    decoder(input_ids=one, position_ids=place, **as_cache(decoder, cache), use_cache=True)
    found = ((place, getattr(layer, "keys", None)) for place, layer in enumerate(cache.layers))
    return {place: keys for place, keys in found if keys is not None}


def _alike(x: Tensor, y: Tensor) -> bool:
    return bool((x - y).abs().max() <= _RELATIVE * x.abs().max())
