"""Layers that attend to all tokens, to the last ones (in a sliding window, or in chunks), or to
none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from transformers import PreTrainedConfig

from kvkeep.features import Feature, Lacks
from kvkeep.hf.kinds.base import Kind
from kvkeep.host import LayerKind
from kvkeep.planes import Chunks

_FULL, _SLIDING, _CHUNKED = "full_attention", "sliding_attention", "chunked_attention"


class Plain(Kind):
    """Every model may have layers that attend to all tokens, and layers that keep nothing."""

    def types(self, text: PreTrainedConfig) -> Mapping[str, LayerKind | None]:
        return {_FULL: LayerKind(_FULL, None), "moe": None, "mlp": None}


class Windows(Kind):
    """Every model may have these layers."""

    def types(self, text: PreTrainedConfig) -> Mapping[str, LayerKind | None]:
        found: dict[str, LayerKind | None] = {_SLIDING: LayerKind(_SLIDING, window_of(text))}
        chunk = _chunk_of(text)
        if chunk is not None:
            found[_CHUNKED] = LayerKind(_CHUNKED, Chunks(chunk))
        return found


class Local(Kind):
    """GPT-Neo: its config describes windows under other names, and its layers apply them
    themselves, by the columns of a text."""

    lacks: ClassVar[Lacks] = {
        Feature.UNATTACHED: "masks the windows of its layers by the columns of a whole text"
    }

    def has(self, text: PreTrainedConfig) -> bool:
        return text.model_type == "gpt_neo"

    def arranged(
        self, text: PreTrainedConfig, names: Sequence[str], layers: Sequence[LayerKind | None]
    ) -> Sequence[LayerKind | None]:
        """Every local layer has the window."""
        local = LayerKind(_SLIDING, text.window_size)
        pairs = zip(layers, text.attention_layers, strict=True)
        return [local if name == "local" else layer for layer, name in pairs]


def window_of(text: PreTrainedConfig) -> int | None:
    """The sliding window of layers with a window, in tokens."""
    window: int | None = getattr(text, "sliding_window", None)
    return window


def type_of_all(text: PreTrainedConfig) -> str:
    """The type of every layer of a model whose config does not list them."""
    if _chunk_of(text) is not None:
        return _CHUNKED
    return _FULL if window_of(text) is None else _SLIDING


def _chunk_of(text: PreTrainedConfig) -> int | None:
    chunk: int | None = getattr(text, "attention_chunk_size", None)
    return chunk
