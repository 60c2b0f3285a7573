"""The rotary embeddings of a transformers model, found in its own code."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from transformers import AutoModel, PreTrainedConfig

from kvkeep.errors import UnsupportedError
from kvkeep.hf.config import decoder_config, layer_kinds
from kvkeep.rotary import Rotary


def rotaries_of(config: PreTrainedConfig) -> list[Rotary | None]:
    """How each layer of the model of this config rotates queries and keys; None where it does not.

    Raises:
        UnsupportedError: some layer does, in a way that is not found in the model's code.
    """
    text = decoder_config(config)
    names = [kind.name for kind in layer_kinds(config)]
    used: Sequence[int] = getattr(text, "no_rope_layers", None) or [1] * len(names)  # 1 where it is
    by_name = _by_name(text, set(names))
    return [by_name[name] if uses else None for name, uses in zip(names, used, strict=True)]


def _by_name(text: PreTrainedConfig, names: set[str]) -> dict[str, Rotary | None]:
    """The rotary embedding of each type of layer."""
    module = _code(text)
    turning = getattr(module, "rotate_half", None) or getattr(module, "rotate_every_two", None)
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
        own = rope.get(name, rope)  # one for all layers, or one for each type
        if own is None:
            found[name] = None
            continue
        shared = getattr(embedding, "inv_freq", None)
        inv_freq = getattr(embedding, f"{name}_inv_freq", shared)
        changing = own.get("rope_type") in ("dynamic", "longrope")  # depend on the length
        if turning is None or inv_freq is None or changing:
            raise UnsupportedError(
                f"kvkeep does not find how {text.model_type} rotates its keys in layers of type "
                f"{name}, which must be known to move keys and to expect queries; without it use "
                "the policy snapkv or h2o, and a PrefixStore for texts"
            )
        # Which element comes first, negated, tells which is paired with the first.
        interleaved = turning(torch.tensor([1.0, 2.0, 3.0, 4.0])).flatten().tolist()[0] == -2.0
        found[name] = Rotary(inv_freq.float(), interleaved)
    return found


def _code(config: PreTrainedConfig) -> ModuleType:
    """The module in which the model of this config is written."""
    mapping: Any = AutoModel._model_mapping
    model = mapping[type(config)]
    if isinstance(model, tuple):
        model = model[0]
    return sys.modules[model.__module__]
