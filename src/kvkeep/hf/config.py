"""Read each layer's kind of attention from a transformers config."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from kvkeep.errors import UnsupportedError
from kvkeep.geometry import Geometry
from kvkeep.host import LayerKind

ATTENTION_PREFIX = "kvkeep_"
"""Prefix of the attention implementations that route a model's attention through its cache."""

ATTACHMENT = "_kvkeep_attachment"
"""The attribute that attached models have."""

_SLIDING = "sliding_attention"
_FULL = "full_attention"
_CHUNKED = "chunked_attention"
_HYBRID, _HYBRID_SLIDING = "hybrid", "hybrid_sliding"
_RECURRENT = frozenset({"linear_attention", "conv"})
_STATELESS = frozenset({"moe", "mlp"})
"""Types of layers that attend and are recurrent, that are recurrent only, and that are neither."""


def base_config(model: Any) -> PreTrainedConfig:
    """The config of a model, of a PEFT model's base, or the config itself."""
    if hasattr(model, "get_base_model"):
        model = model.get_base_model()
    config = getattr(model, "config", model)
    if not isinstance(config, PreTrainedConfig):
        raise UnsupportedError(
            f"{model!r} is neither a transformers model nor its config; call "
            "kvkeep.Cache(model, spec)"
        )
    return config


def decoder_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The config of the language model inside `config`."""
    return config.get_text_config(decoder=True)


def decoder_of(model: PreTrainedModel) -> PreTrainedModel:
    """The module that creates a cache if it is given none."""
    decoder: Any = model.get_decoder()
    if not isinstance(decoder, PreTrainedModel):
        decoder = model.base_model
    return cast(PreTrainedModel, decoder)


def layer_kinds(config: PreTrainedConfig) -> list[LayerKind]:
    """The kind of each layer of a model that attends to keys and values of its own.

    Raises:
        UnsupportedError: some layer caches something else than keys and values or a recurrent
            state, or no layer attends.
    """
    text = decoder_config(config)
    if config.is_encoder_decoder or text.is_encoder_decoder:
        raise _refused(
            text, "it is an encoder-decoder, whose cross attention has a cache of its own"
        )
    if getattr(text, "cross_attention_layers", None):
        raise _refused(text, "some of its layers attend to images and cache those")
    count = getattr(text, "num_hidden_layers", None)
    if count is None:
        raise _refused(text, "its config does not say how many layers it has")
    window = getattr(text, "sliding_window", None)
    chunk = getattr(text, "attention_chunk_size", None)
    names = getattr(text, "layer_types", None)
    if names is None:
        if chunk is not None:
            names = [_CHUNKED] * count
        else:
            names = [_FULL if window is None else _SLIDING] * count
    attending = {_FULL, _SLIDING, _HYBRID, _HYBRID_SLIDING} | ({_CHUNKED} if chunk else set())
    unknown = sorted(set(names) - attending - _RECURRENT - _STATELESS)
    if unknown:
        raise _refused(
            text, f"its layers of type {', '.join(unknown)} do not cache plain keys and values"
        )
    readers = _readers(text, names)
    sliding = {_SLIDING, _HYBRID_SLIDING}
    kinds = [
        LayerKind(name, chunk, place, readers[place], chunked=True)
        if name == _CHUNKED
        else LayerKind(name, window if name in sliding else None, place, readers[place])
        for place, name in enumerate(names)
        if name in attending and place in readers
    ]
    if not kinds:
        raise _refused(text, "none of its layers attends, so there are no keys and values")
    return kinds


def _readers(text: PreTrainedConfig, names: Sequence[str]) -> dict[int, int]:
    """How many layers reuse the keys and values of each layer that has its own, by its place.

    Raises:
        UnsupportedError: a layer reuses those of a layer that comes later, or in another way.
    """
    modes = getattr(text, "kv_sharing_modes", None) or [None] * len(names)
    found: dict[int, int] = {}
    stored: dict[str, int] = {}  # the layer whose keys and values are reused, for each type
    for place, (mode, name) in enumerate(zip(modes, names, strict=True)):
        if mode == "reuse" and name in stored:
            found[stored[name]] += 1
        elif mode in (None, "store"):
            found[place] = 0
            if mode is not None:
                stored[name] = place
        else:
            raise _refused(text, f"layer {place} shares keys and values in an unknown way, {mode}")
    return found


def recurrent_numbers(config: PreTrainedConfig) -> list[int]:
    """How many recurrent or convolutional states each layer of a model has: 0 if it only attends.
    Empty: no layer has any."""
    text = decoder_config(config)
    names = getattr(text, "layer_types", None) or []
    recurrent = _RECURRENT | {_HYBRID, _HYBRID_SLIDING}
    if recurrent.isdisjoint(names):
        return []
    own = getattr(text, "number_of_conv_states", 1)
    return [own if name in recurrent else 0 for name in names]


def layer_geometries(config: PreTrainedConfig, processes: int = 1) -> list[Geometry]:
    """Heads, widths and dtype of each layer's keys and values, of one row.

    Args:
        processes: among which the heads are split; see `kvkeep.hf.parallel.head_processes`.

    Raises:
        UnsupportedError: the model's config does not say how wide its keys are.
    """
    text = decoder_config(config)
    if is_latent(text):
        raise UnsupportedError(
            f"{text.model_type} keeps a latent, whose size its heads do not tell; feed tokens, and "
            "read live_bytes"
        )
    own = text.dtype
    dtype = own if isinstance(own, torch.dtype) else torch.get_default_dtype()

    def geometry(layer: PreTrainedConfig) -> Geometry:
        query_heads = layer.num_attention_heads
        width = getattr(layer, "head_dim", None) or layer.hidden_size // query_heads
        heads = int(getattr(layer, "num_key_value_heads", None) or query_heads)
        return Geometry(1, heads // processes, width, width, dtype)

    places = [kind.place for kind in layer_kinds(config)]
    return [geometry(text.per_layer_config[place]) for place in places if place is not None]


def changing_ropes(config: PreTrainedConfig) -> list[str]:
    """The types of a model's rotary embeddings whose frequencies depend on the text's length."""
    rope = getattr(decoder_config(config), "rope_parameters", None) or {}
    each = [rope, *(x for x in rope.values() if isinstance(x, dict))]  # one, or one per layer type
    return [x["rope_type"] for x in each if x.get("rope_type") in ("dynamic", "longrope")]


def is_latent(config: PreTrainedConfig) -> bool:
    """Whether the model caches a latent and expands it itself (DeepSeek's MLA)."""
    return getattr(decoder_config(config), "kv_lora_rank", None) is not None


def odd_steps(config: PreTrainedConfig) -> str:
    """How layers attend otherwise than by a step on keys and values of their own; empty if they do
    not."""
    if is_latent(config):
        return "expands a latent cache itself"
    return "has layers that reuse the keys and values of others" if is_shared(config) else ""


def is_shared(config: PreTrainedConfig) -> bool:
    """Whether some layers reuse the keys and values of others, and cache none."""
    return any(kind.readers for kind in layer_kinds(config))


def require_plain_steps(config: PreTrainedConfig, what: str, remedy: str) -> None:
    """Raise UnsupportedError if there are `odd_steps`.

    Args:
        what: names what has no such steps.
    """
    odd = odd_steps(config)
    if odd:
        raise UnsupportedError(
            f"{decoder_config(config).model_type} {odd}, which {what} does not support; {remedy}"
        )


def is_routed(config: PreTrainedConfig) -> bool:
    """Whether the model's attention currently runs in kvkeep."""
    return str(config._attn_implementation).startswith(ATTENTION_PREFIX)


def own_implementation(config: Any, otherwise: str) -> str:
    """The attention implementation of an attached model for attention without a kvkeep cache.

    Args:
        config: the config of a module; see `kvkeep.hf.routing`.
        otherwise: the name for a config that is not routed.
    """
    routing = getattr(config, "_kvkeep_routing", None)
    return otherwise if routing is None else routing.original


def _refused(config: PreTrainedConfig, reason: str) -> UnsupportedError:
    return UnsupportedError(
        f"kvkeep cannot cache {config.model_type}: {reason}; use transformers' own cache for it"
    )
