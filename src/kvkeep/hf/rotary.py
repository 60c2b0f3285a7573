"""The rotary embedding of a transformers model, found in its own code."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import torch
from transformers import AutoModel, PreTrainedConfig

from kvkeep.errors import UnsupportedError
from kvkeep.hf.config import decoder_config
from kvkeep.rotary import Rotary


def rotary_of(config: PreTrainedConfig) -> Rotary | None:
    """How the model of this config rotates queries and keys; None if it does not.

    Raises:
        UnsupportedError: it does, in a way that is not found in its code.
    """
    text = decoder_config(config)
    module = _code(text)
    turning = getattr(module, "rotate_half", None) or getattr(module, "rotate_every_two", None)
    classes = [
        found
        for name, found in vars(module).items()
        if name.endswith("RotaryEmbedding") and "Vision" not in name
    ]
    if turning is None and not classes:
        return None
    inv_freq = getattr(classes[0](text), "inv_freq", None) if len(classes) == 1 else None
    rope = getattr(text, "rope_parameters", None) or {}
    changing = rope.get("rope_type") in ("dynamic", "longrope")  # frequencies that depend on length
    if turning is None or inv_freq is None or changing:
        raise UnsupportedError(
            f"kvkeep does not find how {text.model_type} rotates its keys, which the policy must "
            "know; use snapkv or h2o"
        )
    # Which element comes first, negated, tells which is paired with the first.
    interleaved = turning(torch.tensor([1.0, 2.0, 3.0, 4.0])).flatten().tolist()[0] == -2.0
    return Rotary(inv_freq.float(), interleaved)


def _code(config: PreTrainedConfig) -> ModuleType:
    """The module in which the model of this config is written."""
    mapping: Any = AutoModel._model_mapping
    model = mapping[type(config)]
    if isinstance(model, tuple):
        model = model[0]
    return sys.modules[model.__module__]
