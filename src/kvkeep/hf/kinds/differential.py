"""Differential attention: DiffLlama.

The queries of kv heads h and h + H/2, of H heads, both read the values of both heads. The model
therefore computes attention twice, once for each half of the values. A slot here holds the keys and
values of both heads as one key and one value, so one attention with H/2 heads of twice the width
gives both results, and no number is stored twice. A query has zeros for the other head's key.

The halves of both keys alternate in a slot's key, so that one rotary embedding of the doubled width
rotates them. Source: Differential Transformer (arXiv 2410.05258).
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from kvkeep.geometry import Geometry
from kvkeep.hf.handover import handed_on
from kvkeep.hf.kinds.base import Kind
from kvkeep.hf.kinds.replaced_attention import Attention, Output
from kvkeep.rotary import Rotary


class Differential(Kind):
    """Slots hold the keys and values of two kv heads."""

    def has(self, text: PreTrainedConfig) -> bool:
        return text.model_type == "diffllama"

    def geometry(self, own: Geometry) -> Geometry:
        return own._replace(
            heads=own.heads // 2, key_width=2 * own.key_width, value_width=2 * own.value_width
        )

    def in_slots(self, rotary: Rotary) -> Rotary:
        return replace(rotary, inv_freq=rotary.inv_freq.repeat(2))

    def to_slots(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        (a, b), (c, d) = (half.chunk(2, dim=-1) for half in k.chunk(2, dim=1))
        return torch.cat([a, c, b, d], dim=-1), torch.cat(v.chunk(2, dim=1), dim=-1)

    def from_slots(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        a, c, b, d = k.chunk(4, dim=-1)
        first, second = torch.cat([a, b], dim=-1), torch.cat([c, d], dim=-1)
        return torch.cat([first, second], dim=1), torch.cat(v.chunk(2, dim=-1), dim=1)


def differential(
    module: Any,
    attend: Attention,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Any = None,
    **_: Any,
) -> Output:
    """The forward of an attention module, with one attention in place of two."""
    shape, width = hidden_states.shape[:-1], module.head_dim
    made = (module.q_proj, module.k_proj, module.v_proj)
    q, k, v = (linear(hidden_states).view(*shape, -1, width).transpose(1, 2) for linear in made)
    rotate: Any = sys.modules[type(module).__module__].apply_rotary_pos_emb
    q, k = rotate(q, k, *position_embeddings)
    given = attend.update(k, v)
    k, v = handed_on(given, Differential().to_slots(*given))
    heads = k.shape[1]
    out, weights = attend.updated(_queries(q, heads), k, v, attention_mask, module.scaling)
    first, second = _halves(out, heads, 2)
    one, other = (
        torch.exp(torch.sum(x * y, dim=-1, dtype=torch.float32)).to(q.dtype)
        for x, y in ((module.lambda_q1, module.lambda_k1), (module.lambda_q2, module.lambda_k2))
    )
    less = first - (one - other + module.lambda_init) * second
    found = module.o_proj(((1 - module.lambda_init) * module.groupnorm(less)).reshape(*shape, -1))
    return found, None if weights is None else torch.cat(_halves(weights, heads, 1), dim=1)


def _queries(q: Tensor, heads: int) -> Tensor:
    """Queries (B, Hq, n, D) of the model as queries of slots of `heads` heads, (B, Hq, n, 2D): for
    each head of the slots, the queries of its first key, then those of its second key."""
    (a, b), (c, d) = (half.chunk(2, dim=-1) for half in q.chunk(2, dim=1))
    none = torch.zeros_like(a)
    pairs = torch.cat([a, none, b, none], dim=-1), torch.cat([none, c, none, d], dim=-1)
    shape = q.shape[0], heads, -1, *pairs[0].shape[2:]
    return torch.stack([x.reshape(shape) for x in pairs], dim=2).flatten(1, 3)


def _halves(x: Tensor, heads: int, axis: int) -> tuple[Tensor, Tensor]:
    """The results of queries as `_queries` orders them along an axis: those of the first keys, and
    those of the second keys."""
    shape = *x.shape[:axis], heads, 2, -1, *x.shape[axis + 1 :]
    first, second = x.reshape(shape).unbind(axis + 1)
    return first.flatten(axis, axis + 1), second.flatten(axis, axis + 1)
