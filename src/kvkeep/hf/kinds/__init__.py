"""The kinds of models, and the properties of a model's layers that follow from its kinds.

To add a kind, add a module here with a subclass of `Kind`, and an instance of it to `_KINDS`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from kvkeep.errors import UnsupportedError
from kvkeep.features import Feature
from kvkeep.geometry import Geometry
from kvkeep.hf.config import base_config, decoder_config, refused
from kvkeep.hf.kinds.base import Kind
from kvkeep.hf.kinds.biased import Biased
from kvkeep.hf.kinds.blocks import Blocks
from kvkeep.hf.kinds.compressed import Compressed
from kvkeep.hf.kinds.differential import Differential
from kvkeep.hf.kinds.indexed import Indexed, SharesChoice
from kvkeep.hf.kinds.latent import Latent
from kvkeep.hf.kinds.looped import Looped
from kvkeep.hf.kinds.own_states import Griffin, Lightning
from kvkeep.hf.kinds.recurrent import Forwards as Forwards
from kvkeep.hf.kinds.recurrent import Recurrent
from kvkeep.hf.kinds.relative import Residuals
from kvkeep.hf.kinds.shared import Shared
from kvkeep.hf.kinds.states import KeepsStates as KeepsStates
from kvkeep.hf.kinds.states import PassedStates as PassedStates
from kvkeep.hf.kinds.states import states_in as states_in
from kvkeep.hf.kinds.states_alone import StatesAlone
from kvkeep.hf.kinds.weighed import ChoosesByValues, Weighed
from kvkeep.hf.kinds.windows import Local, Plain, Windows, type_of_all
from kvkeep.host import LayerKind

_KINDS: tuple[Kind, ...] = (
    Plain(),
    Windows(),
    Shared(),
    Latent(),
    Indexed(),
    SharesChoice(),
    Compressed(),
    Blocks(),
    Recurrent(),
    Lightning(),
    Griffin(),
    StatesAlone(),
    Biased(),
    Weighed(),
    ChoosesByValues(),
    Differential(),
    Residuals(),
    Looped(),
    Local(),
)


def kinds_of(model: Any) -> tuple[Kind, ...]:
    """The kinds of a model, or of the model with this config."""
    text = decoder_config(base_config(model))
    return tuple(kind for kind in _KINDS if kind.has(text))


def why_not(kinds: Iterable[Kind], feature: Feature) -> str:
    """Why a model of these kinds lacks a feature, as a clause about the model; empty if it does
    not."""
    return next((kind.lacks[feature] for kind in kinds if feature in kind.lacks), "")


def require(model: Any, feature: Feature, remedy: str) -> None:
    """Raise UnsupportedError if a model, or the model with this config, lacks a feature."""
    if reason := why_not(kinds_of(model), feature):
        name = decoder_config(base_config(model)).model_type
        raise UnsupportedError(f"{name} {reason}; {remedy}")


def to_slots(kinds: Iterable[Kind], k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """See `Kind.to_slots`."""
    for kind in kinds:
        k, v = kind.to_slots(k, v)
    return k, v


def from_slots(kinds: Iterable[Kind], k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """See `Kind.from_slots`."""
    for kind in kinds:
        k, v = kind.from_slots(k, v)
    return k, v


def layer_kinds(config: PreTrainedConfig) -> list[LayerKind]:
    """The kind of each layer of a model that has its own keys and values.

    Raises:
        UnsupportedError: a layer caches something other than keys and values or a recurrent state,
            or no layer attends.
    """
    text = decoder_config(config)
    if config.is_encoder_decoder or text.is_encoder_decoder:
        raise refused(
            text, "it is an encoder-decoder, whose cross attention needs a separate cache"
        )
    if getattr(text, "cross_attention_layers", None):
        raise refused(text, "some of its layers attend to images and cache them")
    count = getattr(text, "num_hidden_layers", None)
    if count is None:
        raise refused(text, "its config does not say how many layers it has")
    names = getattr(text, "layer_types", None)
    if names is None:
        names = [type_of_all(text)] * count
    types: dict[str, LayerKind | None] = {}
    for kind in _KINDS:
        types |= kind.types(text)
    unknown = sorted(set(names) - set(types))
    if unknown:
        raise refused(
            text, f"its layers of type {', '.join(unknown)} do not cache plain keys and values"
        )
    found = [types[name] for name in names]
    for kind in kinds_of(config):
        found = list(kind.arranged(text, names, found))
    layers = [replace(one, place=place) for place, one in enumerate(found) if one is not None]
    if not layers:
        raise refused(text, "none of its layers attends, so there are no keys and values")
    return layers


def layer_geometries(config: PreTrainedConfig, processes: int = 1) -> list[Geometry]:
    """Heads, widths and dtype of each layer's keys and values, for one row.

    Args:
        processes: number of processes among which heads are split; see
            `kvkeep.hf.parallel.head_processes`.
    """
    text = decoder_config(config)
    own = text.dtype
    dtype = own if isinstance(own, torch.dtype) else torch.get_default_dtype()
    configs = text.per_layer_config

    def geometry(kind: LayerKind) -> Geometry:
        assert kind.place is not None  # `layer_kinds` has set it
        layer = configs[min(kind.place, len(configs) - 1)]  # behind the last: its further runs
        if kind.latent is not None:
            width = kind.latent + int(layer.qk_rope_head_dim) + kind.beside
            return Geometry(1, 1, width, kind.latent, dtype)
        if kind.counts:
            return Geometry(1, 1, 1, 1, torch.float32)
        query_heads = layer.num_attention_heads
        width = getattr(layer, "head_dim", None) or layer.hidden_size // query_heads
        heads = int(getattr(layer, "num_key_value_heads", None) or query_heads)
        made = Geometry(1, heads // processes, width + kind.beside, width, dtype)
        for one in kinds:
            made = one.geometry(made)
        return made

    kinds = kinds_of(config)
    return [geometry(kind) for kind in layer_kinds(config)]
