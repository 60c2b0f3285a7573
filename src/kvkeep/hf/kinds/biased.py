"""Models whose scores have a linear bias by distance (ALiBi) instead of position embeddings."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
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
        return text.model_type in _SLOPES and bool(getattr(text, "alibi", True))

    def arranged(
        self, text: PreTrainedConfig, names: Sequence[str], layers: Sequence[LayerKind | None]
    ) -> Sequence[LayerKind | None]:
        """Every layer has the same slopes."""
        slopes = tuple(_SLOPES[text.model_type](text).tolist())
        return [one if one is None else replace(one, slopes=slopes) for one in layers]


def _bloom(text: PreTrainedConfig) -> Tensor:
    heads = text.num_attention_heads
    bias: Tensor = _source("bloom").build_alibi_tensor(_two_tokens(), heads, torch.float32)
    return bias[:, 0, 1]


def _falcon(text: PreTrainedConfig) -> Tensor:
    heads = text.num_attention_heads
    bias: Tensor = _source("falcon").build_alibi_tensor(_two_tokens(), heads, torch.float32)
    return bias[:, 0, 1] / math.sqrt(text.hidden_size // heads)


def _mpt(text: PreTrainedConfig) -> Tensor:
    heads = text.num_attention_heads
    bias: Tensor = _source("mpt").build_mpt_alibi_tensor(heads, 2, device="cpu")
    return bias[:, 0, 1] - bias[:, 0, 0]


def _source(name: str) -> Any:
    """The module with a model type's code, which transformers imports when it is first used."""
    return importlib.import_module(f"transformers.models.{name}.modeling_{name}")


def _two_tokens() -> Tensor:
    return torch.ones(1, 2, dtype=torch.int64, device="cpu")


_SLOPES: dict[str, Callable[[PreTrainedConfig], Tensor]] = {
    "bloom": _bloom,
    "falcon": _falcon,
    "mpt": _mpt,
}
"""By type of model: a function for the slope of each head, which calls the model's own code."""
