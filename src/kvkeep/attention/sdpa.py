"""The torch backend: scaled_dot_product_attention's fused kernels; no key or value is expanded.

On the CPU each part of the slots gives a partial result with its log-sum-exp, and the parts are
merged exactly; elsewhere one segment goes to torch's own choice of kernel. The queries of a group
are folded into the query axis, so a key is read once for all of them; a segment shared by all rows
is read once for all rows. Source of the merge: FlashAttention (arXiv 2205.14135), Flash-Decoding.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvkeep.attention.options import Options
from kvkeep.attention.view import Segment, View
from kvkeep.chunk import wants_gradients

_MASKED_SCORES = 1 << 22
"""Most mask elements built at once; longer chunks are computed in blocks of queries."""


class Partial(NamedTuple):
    """Attention over some of the slots: out (B, H, G, n, Dv), lse fp32 (B, H, G, n, 1)."""

    out: Tensor
    lse: Tensor


def refuses(q: Tensor, view: View, options: Options) -> str | None:
    """Why torch's kernels cannot do this call, or None."""
    if options.softcap is not None:
        return "torch's fused kernels have no softcap"
    if options.need_mass:
        return "torch's fused kernels do not report attention mass"
    parts = view.in_runs() if q.is_cpu else view  # off the CPU, decoded as a whole
    if not _gives_lse(q, view) and (len(parts.segments) > 1 or options.sinks is not None):
        return "torch gives a log-sum-exp to merge by on the CPU, for Dk = Dv, without gradients"
    return None


def _gives_lse(q: Tensor, view: View) -> bool:
    segment = view.segments[-1]
    k, v = segment.planes["k"], segment.planes["v"]
    width = segment.value_width
    return q.is_cpu and width == q.shape[-1] and not wants_gradients(q, k, v)


def run(q: Tensor, view: View, options: Options) -> tuple[Tensor, None]:
    """Attention of q (B, Hq, n, D) over the view, in q's dtype."""
    if not _gives_lse(q, view):
        return _whole(q, view, options.scale), None
    rows, query_heads, n, dim = q.shape
    parts = []
    view = view.in_runs()
    for segment in view.segments:
        k, v = segment.keys(q.dtype), segment.values(q.dtype)
        grouped = segment.queries(q).reshape(rows, k.shape[1], -1, n, dim)
        own = n if n > 1 and segment is view.segments[-1] else 0  # one query sees its own slot too
        if view.dense:
            past = k.shape[2] - own
            if past:
                parts.append(_unmasked(grouped, k[:, :, :past], v[:, :, :past], options.scale))
            if own:
                parts.append(_causal(grouped, k[:, :, past:], v[:, :, past:], options.scale))
        elif k.shape[2]:
            parts.append(_masked(grouped, k, v, view, segment, options.scale))
    merged = _merge(parts)
    out = merged.out.reshape(rows, query_heads, n, -1)
    if options.sinks is not None:
        sink = options.sinks.float().reshape(1, -1, 1, 1)
        out = out * torch.sigmoid(merged.lse.reshape(rows, query_heads, n, 1) - sink).to(out.dtype)
    return out, None


def _whole(q: Tensor, view: View, scale: float) -> Tensor:
    """One segment through the public function, which picks a kernel for the device."""
    (segment,) = view.segments
    k, v = segment.keys(q.dtype), segment.values(q.dtype)
    rows, query_heads, n, dim = q.shape
    heads = k.shape[1]
    k, v = k.expand(rows, -1, -1, -1), v.expand(rows, -1, -1, -1)
    q = segment.queries(q)
    attention = torch.nn.functional.scaled_dot_product_attention
    if view.dense and n == 1:
        folded = q.reshape(rows, heads, query_heads // heads, dim)
        return attention(folded, k, v, scale=scale).reshape(rows, query_heads, 1, -1)
    gqa = query_heads != heads
    if view.dense and n == k.shape[2]:
        return attention(q, k, v, is_causal=True, scale=scale, enable_gqa=gqa)
    outs = []
    block = max(1, _MASKED_SCORES // max(1, rows * segment.position.shape[1] * k.shape[2]))
    for start in range(0, n, block):
        queries = slice(start, min(n, start + block))
        seen = view.visible(segment, queries)
        if seen.shape[1] not in (1, query_heads):
            seen = seen.repeat_interleave(query_heads // heads, dim=1)
        out = attention(q[:, :, queries], k, v, attn_mask=seen, scale=scale, enable_gqa=gqa)
        outs.append(out.masked_fill(~seen.any(dim=-1, keepdim=True), 0.0))
    return torch.cat(outs, dim=2)


def _kernel(
    q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None = None, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """q (B, H, m, D) -> out (B, H, m, D), lse (B, H, m); the public function keeps the lse."""
    # The kernel reads along the width as if its stride were 1, and does not look.
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal, attn_mask=mask, scale=scale
    )
    return out, lse


def _unmasked(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Partial:
    """Every query sees every slot, so queries of a group (and of all rows, if the slots are
    shared) are one run of queries to the kernel."""
    rows, heads, group, n, _ = q.shape
    if k.shape[0] == rows:
        out, lse = _kernel(q.reshape(rows, heads, group * n, -1), k, v, scale)
        return Partial(out.view(q.shape), lse.reshape(rows, heads, group, n, 1))
    folded = q.transpose(0, 1).reshape(1, heads, rows * group * n, -1)
    out, lse = _kernel(folded, k, v, scale)
    shape = (heads, rows, group, n, -1)
    return Partial(out.view(shape).transpose(0, 1), lse.reshape(shape).transpose(0, 1))


def _causal(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Partial:
    """Query i sees slots 0..i: one call per query of the group, so that nothing is expanded."""
    rows, group = q.shape[0], q.shape[2]
    k, v = k.expand(rows, -1, -1, -1), v.expand(rows, -1, -1, -1)
    calls = [_kernel(q[:, :, g], k, v, scale, causal=True) for g in range(group)]
    return Partial(
        torch.stack([out for out, _ in calls], dim=2),
        torch.stack([lse for _, lse in calls], dim=2).unsqueeze(-1),
    )


def _masked(q: Tensor, k: Tensor, v: Tensor, view: View, segment: Segment, scale: float) -> Partial:
    """Visibility from positions, a block of queries at a time; the mask is shared by the group."""
    rows, group, n = q.shape[0], q.shape[2], q.shape[3]
    k, v = k.expand(rows, -1, -1, -1), v.expand(rows, -1, -1, -1)
    block = max(1, _MASKED_SCORES // max(1, rows * segment.position.shape[1] * k.shape[2]))
    outs, lses = [], []
    for start in range(0, n, block):
        queries = slice(start, min(n, start + block))
        seen = view.visible(segment, queries)
        mask = torch.zeros(seen.shape, dtype=q.dtype, device=q.device)
        mask.masked_fill_(~seen, -torch.inf)
        calls = [_kernel(q[:, :, g, queries], k, v, scale, mask) for g in range(group)]
        # The kernel gives an empty row the lse 0 and NaN-free output; its weight must be none.
        empty = ~seen.any(dim=-1, keepdim=True)
        lse = torch.stack([lse for _, lse in calls], dim=2).unsqueeze(-1)
        outs.append(torch.stack([out for out, _ in calls], dim=2))
        lses.append(lse.masked_fill(empty[:, :, None], -torch.inf))
    return Partial(torch.cat(outs, dim=3), torch.cat(lses, dim=3))


def _merge(parts: list[Partial]) -> Partial:
    """The parts' outputs, each weighted by its share of the probability."""
    if len(parts) == 1:
        return parts[0]
    lse = torch.stack([part.lse for part in parts])
    total = torch.logsumexp(lse, dim=0)
    weights = torch.exp(lse - total.masked_fill(total == -torch.inf, 0.0))
    out = torch.zeros_like(parts[0].out, dtype=total.dtype)
    for part, weight in zip(parts, weights, strict=True):
        out = torch.addcmul(out, part.out.to(total.dtype), weight)
    return Partial(out.to(parts[0].out.dtype), total)
