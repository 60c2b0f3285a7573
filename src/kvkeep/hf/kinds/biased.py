"""Models whose scores have a linear bias by distance (ALiBi) in place of position embeddings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from transformers import PreTrainedConfig

from kvkeep.hf.kinds.base import Kind
from kvkeep.host import LayerKind


class Biased(Kind):
    """Layers of a cache add the bias, by the positions of their slots: `LayerCache.slopes`.

    Falcon rounds its biases to bfloat16, whatever the model's dtype; here they are not rounded, so
    logits differ by as much as biases of many tokens lose.
    """

    def has(self, text: PreTrainedConfig) -> bool:
        return text.model_type in _SLOPES and bool(getattr(text, "alibi", True))

    def arranged(
        self, text: PreTrainedConfig, names: Sequence[str], layers: Sequence[LayerKind | None]
    ) -> Sequence[LayerKind | None]:
        """Every layer has the same slopes."""
        if not self.has(text):
            return layers
        slopes = tuple(_SLOPES[text.model_type](text).tolist())
        return [one if one is None else replace(one, slopes=slopes) for one in layers]


def _bloom(text: PreTrainedConfig) -> torch.Tensor:
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    return build_alibi_tensor(_two_tokens(), text.num_attention_heads, torch.float32)[:, 0, 1]


def _falcon(text: PreTrainedConfig) -> torch.Tensor:
    from transformers.models.falcon.modeling_falcon import build_alibi_tensor

    heads = text.num_attention_heads
    bias = build_alibi_tensor(_two_tokens(), heads, torch.float32)[:, 0, 1]
    return bias * (text.hidden_size // heads) ** -0.5


def _mpt(text: PreTrainedConfig) -> torch.Tensor:
    from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

    bias = build_mpt_alibi_tensor(text.num_attention_heads, 2, device="cpu")[:, 0]
    return bias[:, 1] - bias[:, 0]


def _two_tokens() -> torch.Tensor:
    return torch.ones(1, 2, dtype=torch.int64, device="cpu")


_SLOPES: dict[str, Callable[[PreTrainedConfig], torch.Tensor]] = {
    "bloom": _bloom,
    "falcon": _falcon,
    "mpt": _mpt,
}
"""The bias that one position makes for each head, by the type of the model, as its code computes
it."""
