"""Scores with a bias for each key that the model computes of the token's values: Doge.

The bias of a key is the same for all queries, so it is stored in the token's slot, behind the key:
its elements there add up to the bias, and queries have the same number for each of them. Attention
over the wider keys then adds the bias, with any backend and codec.

With more tokens than `keep_window_size`, a query sees only the tokens with the largest biases.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from kvkeep.features import Feature, Lacks, unsupported
from kvkeep.hf.handover import Handed, IndexPart
from kvkeep.hf.kinds.base import Kind
from kvkeep.hf.kinds.indexed import NOT_CHOSEN, Indexed
from kvkeep.hf.kinds.replaced_attention import Attention, Output
from kvkeep.host import LayerKind
from kvkeep.layer.sight import Sighted

_ELEMENTS = 8
"""The elements of a slot's key that add up to the bias. Codecs pack several elements together, so
their number is a multiple of theirs."""


class Weighed(Kind):
    """Slots hold a bias behind each key."""

    lacks: ClassVar[Lacks] = {
        Feature.PAIRS: "adds to scores a bias that keys and values alone do not tell"
    }

    def has(self, text: PreTrainedConfig) -> bool:
        return text.model_type == "doge"

    def arranged(
        self, text: PreTrainedConfig, names: Sequence[str], layers: Sequence[LayerKind | None]
    ) -> Sequence[LayerKind | None]:
        """Every layer has the bias."""
        return [one if one is None else replace(one, beside=_ELEMENTS) for one in layers]

    def from_slots(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return k[..., : v.shape[-1]], v  # an unattached model's slots have no bias


class ChoosesByValues(Indexed):
    """Texts may be longer than the number of tokens that a query sees."""

    lacks: ClassVar[Lacks] = unsupported(
        "chooses the tokens that a query sees by a bias of their values", *NOT_CHOSEN
    )

    def has(self, text: PreTrainedConfig) -> bool:
        few = getattr(text, "keep_window_size", None)
        return few is not None and few < text.max_position_embeddings

    def types(self, text: PreTrainedConfig) -> dict[str, LayerKind | None]:
        return {}

    def arranged(
        self, text: PreTrainedConfig, names: Sequence[str], layers: Sequence[LayerKind | None]
    ) -> Sequence[LayerKind | None]:
        return layers

    def behind(self, layer: Any) -> Tensor | None:
        return None


def weighed(
    module: Any,
    attend: Attention,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Any = None,
    **_: Any,
) -> Output:
    """The forward of an attention module, with biases behind its keys."""
    shape = hidden_states.shape[:-1]
    parts = (*shape, -1, module.head_dim)
    q, k = (
        norm(linear(hidden_states).view(parts)).transpose(1, 2)
        for norm, linear in ((module.q_norm, module.q_proj), (module.k_norm, module.k_proj))
    )
    values = module.v_proj(hidden_states)
    rotate: Any = sys.modules[type(module).__module__].apply_rotary_pos_emb
    q, k = rotate(q, k, *position_embeddings)
    k, v = attend.update(k, values.view(parts).transpose(1, 2))
    weights = module.A * torch.nn.functional.softplus(module.dt_proj(values))
    bias = torch.exp(weights).transpose(1, 2)[..., None]
    handed: Handed = k.kvkeep  # type: ignore[attr-defined]
    chosen = _choice(handed, bias, attention_mask, module.keep_window_size)
    keys = (bias / _ELEMENTS).expand(-1, -1, -1, _ELEMENTS)
    handed.indexed = IndexPart(keys, chosen, weight=1 / module.scaling)
    out, found = attend.updated(q, k, v, attention_mask, module.scaling, module.attention_dropout)
    return module.o_proj(out.flatten(2)), found


def _choice(handed: Handed, bias: Tensor, mask: Tensor, most: int) -> Tensor | None:
    """The positions of the tokens with the largest biases of those that each query sees, int32 (B,
    H, n, c); None: a query sees all of them. `bias`: of the new tokens, (B, H, n, 1). A graph, and
    a model with fewer positions than `most`, has no choice."""
    if torch.compiler.is_compiling() or int(mask.max()) < most:
        return None
    sighted: Sighted = handed.layer.sighted(mask[:, 0, 0])
    every = bias[..., 0]
    if sighted.keys is not None:
        past = sighted.keys[..., -_ELEMENTS:].sum(dim=-1)
        every = torch.cat([past.expand(len(every), -1, -1), every], dim=2)
    found = every[:, :, None].masked_fill(~sighted.visible, -torch.inf)
    best = found.topk(min(most, found.shape[3]), dim=3).indices
    position = sighted.position.to(torch.int32)[:, :, None]
    return position.expand(*found.shape).gather(3, best)
