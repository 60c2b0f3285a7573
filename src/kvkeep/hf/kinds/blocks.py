"""Attention to blocks of tokens that an index chooses for each query and kv head: MiniMax M3.

A block holds tokens at adjacent positions. Its score is the highest score of its tokens that the
query sees, and the blocks before the query are always chosen. The model's own indexer takes columns
as positions, so kvkeep computes the same choice by the positions of slots.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from kvkeep.hf.config import decoder_of, refused
from kvkeep.hf.handover import Handed, IndexPart
from kvkeep.hf.kinds.base import Handle, Kind, Replaced
from kvkeep.host import LayerKind
from kvkeep.layer.sight import Sighted


class Blocks(Kind):
    """Models whose index chooses blocks of tokens."""

    def has(self, text: PreTrainedConfig) -> bool:
        return "minimax_m3_sparse" in (getattr(text, "layer_types", None) or ())

    def arranged(
        self, text: PreTrainedConfig, names: Sequence[str], layers: Sequence[LayerKind | None]
    ) -> Sequence[LayerKind | None]:
        """Raise UnsupportedError unless each kv head has one head of the index."""
        if text.index_n_heads != text.num_key_value_heads:
            raise refused(
                text,
                f"its index has {text.index_n_heads} heads for {text.num_key_value_heads} kv heads",
            )
        return layers

    def why_not_moved(self, text: PreTrainedConfig, tokens: int, start: int) -> str:
        """A text's own choice of blocks is the same after a move if its blocks are the same, or if
        all of them are chosen."""
        size, local = text.index_block_size, text.index_local_blocks
        blocks = (start + tokens - 1) // size - start // size + max(1, local)
        if blocks <= text.index_topk_blocks or (start % size == 0 and local <= 1):
            return ""
        return (
            f"has an index of blocks of {size} tokens, which would hold other tokens of a text of "
            f"{tokens} that begins at position {start}"
        )

    def attach(self, model: PreTrainedModel) -> Sequence[Handle]:
        """Let indexers choose among the tokens of a kvkeep cache."""
        changes: list[Handle] = []
        for module in decoder_of(model).modules():
            index: Any = getattr(module, "indexer", None)
            if index is not None:
                changes.append(Replaced(module, "forward", partial(_attended, module.forward)))
                changes.append(Replaced(index, "forward", partial(_chosen, index.forward, index)))
        return changes


def _attended(own: Any, *args: Any, **kwargs: Any) -> Any:
    """The forward of an attention module, which with a kvkeep cache gives the positions of slots to
    its indexer."""
    mask = kwargs.get("attention_mask")
    if isinstance(mask, Tensor) and hasattr(mask, "kvkeep"):
        kwargs["position_ids"] = mask[:, 0, 0]
    return own(*args, **kwargs)


def _chosen(
    own: Any,
    index: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    cache: Any,
    position_ids: Tensor,
) -> Any:
    """The forward of an indexer. With a kvkeep cache, the attention function is told of the choice;
    otherwise the result is a function that makes the mask of the chosen tokens."""
    handed: Handed | None = getattr(cache, "handed", None)
    if handed is None:
        blocks = own(hidden_states, position_embeddings, cache, position_ids)
        return partial(index.build_block_mask, blocks, position_ids=position_ids)
    q, k = _projected(index, hidden_states, position_embeddings)
    sighted: Sighted = handed.layer.sighted(position_ids)
    chosen = _choice(index, q, k, sighted)
    handed.indexed = IndexPart(k.detach(), chosen)
    return None


def _projected(index: Any, hidden: Tensor, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The index's queries (B, H, n, D) and keys (B, 1, n, D)."""
    shape, width = (*hidden.shape[:2], -1, index.head_dim), index.head_dim
    q = index.q_norm(index.q_proj(hidden).view(shape)).transpose(1, 2)
    k = index.k_norm(index.k_proj(hidden).view(shape)).transpose(1, 2)
    rotate: Any = sys.modules[type(index).__module__].apply_rotary_pos_emb
    found: tuple[Tensor, Tensor] = rotate(q, k, *(x[..., :width] for x in angles))
    return found


def _choice(index: Any, q: Tensor, k: Tensor, sighted: Sighted) -> Tensor | None:
    """The positions of the chosen blocks, int32 (B, H, n, c), -1 where there are fewer; None: all
    tokens are chosen."""
    size, n = index.block_size, q.shape[2]
    keys = k.expand(-1, q.shape[1], -1, -1)
    if sighted.keys is not None:
        past = sighted.keys[..., -k.shape[-1] :]
        keys = torch.cat([past.expand(len(k), -1, -1, -1), keys], dim=2)
    block = sighted.position.clamp(min=0) // size
    count = int(block.max()) + 1
    if count <= index.topk_blocks:
        return None
    scores = (q.float() @ keys.float().transpose(2, 3)).masked_fill(~sighted.visible, -torch.inf)
    best = scores.new_full((*q.shape[:3], count), -torch.inf)
    best.scatter_reduce_(3, block[:, :, None].expand_as(scores).long(), scores, "amax")
    local = torch.arange(index.local_blocks, device=q.device)
    own = block[..., -n:, None] - local
    best.scatter_(3, own.clamp(min=0).expand(*q.shape[:3], -1).long(), torch.inf)
    top = best.topk(index.topk_blocks, dim=3)
    first = (top.indices * size)[..., None]
    positions: Tensor = first + torch.arange(size, device=q.device)
    positions = positions.masked_fill((top.values == -torch.inf)[..., None], -1)
    return positions.flatten(3).to(torch.int32)
