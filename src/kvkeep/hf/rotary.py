"""Finds the rotary embeddings of a transformers model in the model's code."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModel, PreTrainedConfig

from kvkeep.errors import UnsupportedError
from kvkeep.hf.config import changing_ropes, decoder_config, same_frequencies
from kvkeep.hf.kinds import kinds_of, layer_kinds
from kvkeep.rotary import Rotary

_OF_ATTENTION = "apply_rotary_position_embeddings"
"""The method of RoFormer's attention that rotates queries and keys."""


def require_same_frequencies(config: PreTrainedConfig, tokens: int | None = None) -> None:
    """Raise UnsupportedError if frequencies of a model's rotary embedding depend on the length of
    texts of up to `tokens` tokens; None: of any length."""
    most = same_frequencies(config)
    if most is None or (tokens is not None and tokens <= most):
        return
    text, kind = decoder_config(config), changing_ropes(config)[0]
    why = f"the rotary frequencies of {text.model_type} ({kind}) change after {most} tokens, so "
    if tokens is None:
        raise UnsupportedError(
            f"{why}kvkeep cannot move keys and predict queries; use the policy snapkv or h2o, and "
            "kvkeep.blocks.join for shorter texts"
        )
    raise UnsupportedError(
        f"{why}keys cannot be moved in a text of {tokens}; join fewer or shorter texts"
    )


def rotaries_of(config: PreTrainedConfig) -> list[Rotary | None]:
    """The rotary embedding of the slots of each attention layer of the model with this config; None
    for a layer without one.

    Raises:
        UnsupportedError: a layer's rotary embedding cannot be found in the model's code.
    """
    text = decoder_config(config)
    names = [kind.name for kind in layer_kinds(config)]
    # Despite its name, the list has 1 for layers with a rotary embedding.
    used: Sequence[int] = getattr(text, "no_rope_layers", None) or [1] * len(names)
    by_name = _by_name(text, set(names))
    for kind in kinds_of(config):
        by_name = {name: one and kind.in_slots(one) for name, one in by_name.items()}
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
    turns_itself = any(hasattr(found, _OF_ATTENTION) for found in vars(module).values())
    if turning is None and not classes and not turns_itself:
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
        if turning is None or inv_freq is None:
            raise UnsupportedError(
                f"kvkeep cannot find the rotary embedding of {text.model_type} in layers of type "
                f"{name}, which is needed to move keys and to predict queries; use the policy "
                "snapkv or h2o instead, and a PrefixStore for texts"
            )
        # The result's first element is the partner of input element 0. It is negative unless the
        # model rotates in the other direction.
        paired = turning(torch.tensor([1.0, 2.0, 3.0, 4.0])).flatten().tolist()[0]
        turned = inv_freq.float() * (1.0 if paired < 0 else -1.0)
        rotary = found[name] = Rotary(turned, interleaved=abs(paired) == 2.0)
        if own.get("mrope_section") and not _turns_alike(module, embedding, rotary):
            raise UnsupportedError(
                f"kvkeep does not know how {text.model_type} rotates keys, which is needed to move "
                "them and to predict queries; use the policy snapkv or h2o instead, and a "
                "PrefixStore for texts"
            )
    return found


def _turning(module: ModuleType) -> Callable[[Tensor], Tensor] | None:
    """The function that exchanges the halves, or neighbours, of a text's queries and keys; a model
    may have another function for images."""
    code = getattr(getattr(module, "apply_rotary_pos_emb", None), "__code__", None)
    called = [name for name in getattr(code, "co_names", ()) if name.startswith("rotate_")]
    names = (*called, "rotate_half", "rotate_every_two")
    return next((getattr(module, name) for name in names if hasattr(module, name)), None)


def _turns_alike(module: ModuleType, embedding: Any, rotary: Rotary) -> bool:
    """Whether the model's code rotates like `rotary`, up to a factor, if all three parts of a
    position are equal."""
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
    name = type(config).__module__.replace("configuration_", "modeling_")  # of a model's part
    if name not in sys.modules:
        raise UnsupportedError(
            f"kvkeep cannot find the code of {config.model_type}, which says how keys are rotated; "
            "load the model first"
        )
    return sys.modules[name]
