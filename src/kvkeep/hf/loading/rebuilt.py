"""Builds a transformers model again from its fingerprint and weights."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from kvkeep.errors import UnsupportedError, reason_of
from kvkeep.hf.loading.fingerprint import relevant_fields

_REFUSED = {"auto_map", "quantization_config"}
"""Config fields of models whose code or weights differ from the usual ones of their type."""

_SHARES = {"partial_rotary_factor", "rotary_pct"}
"""Config fields for the share of a head's dimensions that is rotated."""


def rebuilt(
    fingerprint: Mapping[str, str], weights: Mapping[str, Tensor], *, layers: int, positions: int
) -> PreTrainedModel:
    """A model with the type and config in a fingerprint. On a CPU the weights are shared, not
    copied.

    Args:
        fingerprint: the fingerprint of a causal model, from an untrusted file. Only the type and
            numbers of its config are used; the caller must compare the result's fingerprint.
        weights: tensors by names of a state dict.
        layers: the required number of layers, so that a file cannot request any number.
        positions: the context length.

    Raises:
        UnsupportedError: the config does not fit the weights, or no model can be built from it.
        MemoryError, torch.OutOfMemoryError: memory is short.
    """
    try:
        fields: dict[str, Any] = json.loads(fingerprint["config"])
        if fields.get("num_hidden_layers") != layers:
            raise ValueError(f"it has {fields.get('num_hidden_layers')} layers, not {layers}")
        if odd := sorted(fields.keys() & _REFUSED):
            raise ValueError(f"it sets {odd[0]}")
        rope = json.loads(fingerprint["rope"])
        _require_shares(fields)
        _require_shares(rope)
        usual = relevant_fields(AutoConfig.for_model(fields["model_type"]))
        config = AutoConfig.for_model(
            **{name: value for name, value in fields.items() if name in usual},
            rope_parameters=rope,
            max_position_embeddings=positions,
        )
        model = _filled(config, weights)
        # Set other fields only now: transformers might load or choose code by them.
        for name in fields.keys() - usual.keys():
            if name.startswith("_") or hasattr(model.config, name):
                raise ValueError(f"it sets {name}")
            setattr(model.config, name, fields[name])
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:  # a config may have any fields
        raise UnsupportedError(f"its config cannot be built: {reason_of(error)}") from error
    return model


def _require_shares(fields: Any) -> None:
    """Raise ValueError if a share of rotated dimensions is not from 0 to 1, because buffers are
    sized by it. Rope parameters may be nested, by type of layer."""
    for name, value in fields.items() if isinstance(fields, dict) else ():
        if isinstance(value, dict):
            _require_shares(value)
        elif name in _SHARES and not (isinstance(value, int | float) and 0 <= value <= 1):
            raise ValueError(f"{name} is {value!r:.40}, not between 0 and 1")


def _filled(config: PreTrainedConfig, weights: Mapping[str, Tensor]) -> PreTrainedModel:
    kind: Any = AutoModelForCausalLM._model_mapping[type(config)]
    with torch.device("meta"):
        shapes = {name: x.shape for name, x in kind(config).state_dict().items()}
    given = {name: x.shape for name, x in weights.items()}
    if given != {name: shape for name, shape in shapes.items() if name in given}:
        raise ValueError("the weights have other names or shapes")
    if missing := shapes.keys() - given.keys() - {"lm_head.weight"}:  # it may be tied
        raise ValueError(f"there are no weights {sorted(missing)[:3]}")
    dtype = next(iter(weights.values())).dtype
    with _without_progress():
        model: PreTrainedModel = kind.from_pretrained(
            None, config=config, state_dict=dict(weights), dtype=dtype
        )
    model.eval()
    return model


@contextmanager
def _without_progress() -> Iterator[None]:
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
