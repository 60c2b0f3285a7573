"""Attention of other libraries over plain keys and values, to compare with `attend`.

Each function takes q (B, Hq, n, Dk), k (B, H, S, Dk) and v (B, H, S, Dv), whose last n slots are
the queries' own, and returns a call that computes (B, Hq, n, Dv). Values narrower than keys are
their first elements. Work that can be done in advance is not in the call.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

Attention = Callable[[], Tensor]

TORCH = "torch-sdpa"
"""torch's scaled_dot_product_attention with enable_gqa."""

_attention = torch.nn.functional.scaled_dot_product_attention


def torch_sdpa(q: Tensor, k: Tensor, v: Tensor) -> Attention:
    """See `TORCH`."""
    mask = _mask(q, k)
    return lambda: _attention(q, k, v, attn_mask=mask, enable_gqa=True)


def torch_folded(q: Tensor, k: Tensor, v: Tensor) -> Attention:
    """torch's attention with the queries of a group folded into the query axis. Its fused kernels
    need values as wide as keys, so values within keys are the keys, and the result is narrowed."""
    folded, mask = _folded(q, k)
    width, values = v.shape[3], k if v.shape[3] < k.shape[3] else v
    return lambda: _attention(folded, k, values, attn_mask=mask).view(q.shape)[..., :width]


def torch_expanded(q: Tensor, k: Tensor, v: Tensor) -> Attention:
    """torch's attention over keys and values repeated for each query head, which is not timed."""
    group = q.shape[1] // k.shape[1]
    keys, values = (x.repeat_interleave(group, dim=1) for x in (k, v))
    if q.shape[2] == k.shape[2] > 1:
        return lambda: _attention(q, keys, values, is_causal=True)
    mask = _mask(q, k)
    return lambda: _attention(q, keys, values, attn_mask=mask)


def torch_math(q: Tensor, k: Tensor, v: Tensor) -> Attention:
    """torch's attention by two products of matrices, with queries folded as in `torch_folded`."""
    folded, mask = _folded(q, k)

    def by_math() -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            out = _attention(folded, k, v, attn_mask=mask)
        return out.view(*q.shape[:3], -1)

    return by_math


def flex(q: Tensor, k: Tensor, v: Tensor) -> Attention:
    """FlexAttention, compiled for these shapes."""
    it: Any = import_module("torch.nn.attention.flex_attention")
    n, past = q.shape[2], k.shape[2] - q.shape[2]
    seen = None
    if n > 1:

        def causal(row: Tensor, head: Tensor, query: Tensor, slot: Tensor) -> Tensor:
            return slot <= query + past

        seen = it.create_block_mask(causal, None, None, n, k.shape[2], device=q.device)
    attention = _compiled(it.flex_attention)
    return lambda: attention(q, k, v, block_mask=seen, enable_gqa=True)


@cache
def _compiled(attention: Any) -> Any:
    torch._dynamo.reset()  # graphs of other measurements would count against its limit
    return torch.compile(attention, dynamic=False)


RIVALS: dict[str, Callable[[Tensor, Tensor, Tensor], Attention]] = {
    TORCH: torch_sdpa,
    "torch-folded": torch_folded,
    "torch-expanded": torch_expanded,
    "torch-math": torch_math,
    "flex": flex,
}

ON_CPU = (TORCH, "torch-folded", "torch-expanded")
"""Measured by default on the CPU: torch's own ways that do not store all scores."""

OF_LATENTS = ("torch-folded", "torch-math")
"""Measured by default where values are elements of their keys: those that do not copy the keys for
each query head."""


def _folded(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor | None]:
    """The queries of each kv head in one axis, (B, H, group * n, Dk), and their causal mask."""
    mask = _mask(q, k)
    folded = q.reshape(len(q), k.shape[1], -1, q.shape[3])
    return folded, None if mask is None else mask.repeat(q.shape[1] // k.shape[1], 1)


def _mask(q: Tensor, k: Tensor) -> Tensor | None:
    """The causal mask, bool (n, S); None for a single query, which sees all slots."""
    n, slots = q.shape[2], k.shape[2]
    if n == 1:
        return None
    return torch.ones(n, slots, dtype=torch.bool, device=q.device).tril(slots - n)
