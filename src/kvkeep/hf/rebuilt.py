"""A model of transformers, built again from its fingerprint and weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from kvkeep.errors import UnsupportedError


def rebuilt(
    fingerprint: Mapping[str, str], weights: Mapping[str, Tensor], *, layers: int, positions: int
) -> PreTrainedModel:
    """A model with the type and config of the one that gave a fingerprint. The weights are shared,
    not copied.

    Args:
        fingerprint: of a causal model, from anywhere. It is only read for the type and numbers of a
            config; what is built must be compared with it.
        weights: by the names of a state dict.
        layers: the number of layers that it must have, so that no file decides how many are built.
        positions: the context length.

    Raises:
        UnsupportedError: the config does not fit the weights, or cannot be built.
    """
    try:
        fields: dict[str, Any] = json.loads(fingerprint["config"])
        if fields.get("num_hidden_layers") != layers:
            raise ValueError(f"it has {fields.get('num_hidden_layers')} layers, not {layers}")
        config = AutoConfig.for_model(
            **fields,
            rope_parameters=json.loads(fingerprint["rope"]),
            max_position_embeddings=positions,
        )
        kind = AutoModelForCausalLM._model_mapping[type(config)]
        with torch.device("meta"):
            names = kind(config).state_dict()
        if any(names[name].shape != x.shape for name, x in weights.items()):
            raise ValueError("its weights have other shapes")
        dtype = next(iter(weights.values())).dtype
        model: PreTrainedModel = kind.from_pretrained(
            None, config=config, state_dict=dict(weights), dtype=dtype
        )
    except Exception as error:  # a config may have any fields
        reason = " ".join(str(error).split())[:200]
        raise UnsupportedError(f"its config cannot be built: {reason}") from error
    return model.eval()
