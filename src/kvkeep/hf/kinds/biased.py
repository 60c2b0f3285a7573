"""Models whose scores have a linear bias by distance (ALiBi) instead of position embeddings."""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from kvkeep.hf.kinds.base import Kind
from kvkeep.host import LayerKind


class Biased(Kind):
    """A cache's layers add the bias, by the positions of their slots: `LayerCache.slopes`.

    Falcon rounds its biases to bfloat16, whatever the model's dtype. kvkeep does not round them, so
    logits of long texts differ by this rounding.
    """

    placeless: ClassVar[bool] = True

    def has(self, text: PreTrainedConfig) -> bool:
        return text.model_type in ("bloom", "falcon", "mpt") and bool(getattr(text, "alibi", True))

    def arranged(
        self, text: PreTrainedConfig, names: Sequence[str], layers: Sequence[LayerKind | None]
    ) -> Sequence[LayerKind | None]:
        """Every layer has the same slopes."""
        slopes = tuple(_slopes(text).tolist())
        return [one if one is None else replace(one, slopes=slopes) for one in layers]


def _slopes(text: PreTrainedConfig) -> Tensor:
    """The slope of each head, by the model's own code, from the biases of two tokens."""
    name, heads = text.model_type, text.num_attention_heads
    source: Any = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    if name == "mpt":
        bias: Tensor = source.build_mpt_alibi_tensor(heads, 2, device="cpu")
        return bias[:, 0, 1] - bias[:, 0, 0]
    tokens = torch.ones(1, 2, dtype=torch.int64, device="cpu")
    bias = source.build_alibi_tensor(tokens, heads, torch.float32)
    return bias[:, 0, 1] / (math.sqrt(text.hidden_size // heads) if name == "falcon" else 1)
