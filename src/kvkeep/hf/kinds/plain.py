"""Layers that attend to all tokens, and layers without keys, values or states."""

from __future__ import annotations

from collections.abc import Mapping

from transformers import PreTrainedConfig

from kvkeep.hf.kinds.base import Kind
from kvkeep.host import LayerKind

FULL = "full_attention"


class Plain(Kind):
    """Every model may have these layers."""

    def types(self, text: PreTrainedConfig) -> Mapping[str, LayerKind | None]:
        return {FULL: LayerKind(FULL, None), "moe": None, "mlp": None}
