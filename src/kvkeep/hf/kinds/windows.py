"""Layers that attend to the last tokens: in a sliding window, or in chunks."""

from __future__ import annotations

from collections.abc import Mapping

from transformers import PreTrainedConfig

from kvkeep.hf.kinds.base import Kind
from kvkeep.hf.kinds.plain import FULL
from kvkeep.host import LayerKind
from kvkeep.planes import Chunks

_SLIDING, _CHUNKED = "sliding_attention", "chunked_attention"


class Windows(Kind):
    """Every model may have these layers."""

    def types(self, text: PreTrainedConfig) -> Mapping[str, LayerKind | None]:
        found: dict[str, LayerKind | None] = {_SLIDING: LayerKind(_SLIDING, window_of(text))}
        chunk = _chunk_of(text)
        if chunk is not None:
            found[_CHUNKED] = LayerKind(_CHUNKED, Chunks(chunk))
        return found


def window_of(text: PreTrainedConfig) -> int | None:
    """The sliding window of the layers that have one, in tokens."""
    window: int | None = getattr(text, "sliding_window", None)
    return window


def type_of_all(text: PreTrainedConfig) -> str:
    """The type of every layer of a model whose config does not list them."""
    if _chunk_of(text) is not None:
        return _CHUNKED
    return FULL if window_of(text) is None else _SLIDING


def _chunk_of(text: PreTrainedConfig) -> int | None:
    chunk: int | None = getattr(text, "attention_chunk_size", None)
    return chunk
