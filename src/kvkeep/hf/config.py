"""The configs of transformers' models."""

from __future__ import annotations

from typing import Any, cast

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from kvkeep.errors import UnsupportedError

ATTENTION_PREFIX = "kvkeep_"
"""Prefix of the names of kvkeep's attention implementations, which run the steps of a cache."""

ATTACHMENT = "_kvkeep_attachment"
"""The attribute of attached models that holds their `Attachment`."""


def base_config(model: Any) -> PreTrainedConfig:
    """The config of a model; of a PEFT model, the base model's config. A config is returned as it
    is."""
    if hasattr(model, "get_base_model"):
        model = model.get_base_model()
    config = getattr(model, "config", model)
    if not isinstance(config, PreTrainedConfig):
        raise UnsupportedError(
            f"a {type(model).__name__} is neither a transformers model nor its config; call "
            "kvkeep.Cache(model, spec)"
        )
    return config


def decoder_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The config of the language model inside `config`."""
    return config.get_text_config(decoder=True)


def decoder_of(model: PreTrainedModel) -> PreTrainedModel:
    """The decoder of a model: the module that creates a cache if it is given none."""
    decoder: Any = model.get_decoder()
    if not isinstance(decoder, PreTrainedModel):
        decoder = model.base_model
    return cast(PreTrainedModel, decoder)


def layer_lists(decoder: nn.Module, count: int) -> list[nn.ModuleList]:
    """The lists of `count` modules in a decoder, the outermost first. One of them has the decoder's
    layers; others may have layers for images."""
    lists = (module for module in decoder.modules() if isinstance(module, nn.ModuleList))
    return [found for found in lists if len(found) == count]


def changing_ropes(config: PreTrainedConfig) -> list[str]:
    """The types of a model's rotary embeddings whose frequencies depend on the text's length."""
    return [x["rope_type"] for x in _ropes(config) if x.get("rope_type") in ("dynamic", "longrope")]


def same_frequencies(config: PreTrainedConfig) -> int | None:
    """The most tokens of texts for which no frequency of a model's rotary embeddings depends on the
    text's length; None: it never does."""
    limits = []
    for rope in _ropes(config):
        if rope.get("rope_type") == "longrope":
            limits.append(int(rope["original_max_position_embeddings"]))
        elif rope.get("rope_type") == "dynamic":
            # A model that has read a longer text returns to its first frequencies only below it.
            limits.append(int(decoder_config(config).max_position_embeddings) - 1)
    return min(limits, default=None)


def _ropes(config: PreTrainedConfig) -> list[dict[str, Any]]:
    """The parameters of a model's rotary embedding, or of those of its types of layers."""
    rope = getattr(decoder_config(config), "rope_parameters", None) or {}
    return [rope, *(x for x in rope.values() if isinstance(x, dict))]


def is_routed(config: PreTrainedConfig) -> bool:
    """Whether the model's attention currently runs in kvkeep."""
    return str(config._attn_implementation).startswith(ATTENTION_PREFIX)


def unrouted(config: PreTrainedConfig) -> PreTrainedConfig:
    """A model's config before `attach` replaced it by a view; see `forward.routing`."""
    routing = getattr(config, "_kvkeep_routing", None)
    return config if routing is None else cast(PreTrainedConfig, routing.config)


def own_implementation(config: Any, otherwise: str) -> str:
    """The attention implementation of an attached model for attention without a kvkeep cache.

    Args:
        config: the config of a module; see `kvkeep.hf.forward.routing`.
        otherwise: the name for a config that is not routed.
    """
    routing = getattr(config, "_kvkeep_routing", None)
    return otherwise if routing is None else routing.original


def refused(config: PreTrainedConfig, reason: str) -> UnsupportedError:
    """The error for a model that kvkeep cannot cache."""
    return UnsupportedError(
        f"kvkeep cannot cache {config.model_type}: {reason}; use transformers' own cache for it"
    )
