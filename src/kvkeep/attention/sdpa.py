"""The torch backend: scaled_dot_product_attention's fused kernels, without expanded keys.

On the CPU each part of the slots gives a partial result with its log-sum-exp, and the results are
merged exactly. On other devices torch chooses a kernel for a single segment. The queries of a group
are folded into the query axis, so each key is read once for the group; a segment shared by all rows
is read once for all rows. Given the merged result and its log-sum-exp, the kernel's
backward computes the gradient of each part separately, so no scores are saved. Source:
FlashAttention (arXiv 2205.14135), Flash-Decoding.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from kvkeep.attention.options import Options
from kvkeep.attention.view import Segment, View
from kvkeep.checks import wants_gradients
from kvkeep.planes import POSITION

_MASKED_SCORES = 1 << 22
"""Most mask elements in memory at once; longer chunks are computed in blocks of queries."""


class Partial(NamedTuple):
    """Attention over some of the slots: out (B, H, G, n, Dv), lse fp32 (B, H, G, n, 1)."""

    out: Tensor
    lse: Tensor


def refuses(q: Tensor, view: View, options: Options) -> str | None:
    """The reason why torch's kernels do not support this call, or None."""
    if options.softcap is not None:
        return "torch's fused kernels have no softcap"
    if options.need_mass:
        return "torch's fused kernels do not report attention mass"
    if options.bias is not None:
        return "torch's fused kernels have no gradients of a bias"
    if options.slopes is not None and not _gives_lse(q, view):
        return "a bias per head is slow, except on the CPU with Dk = Dv"
    parts = view.in_runs() if q.is_cpu else view  # other devices decode it as a whole
    if not _gives_lse(q, view) and (len(parts.segments) > 1 or options.sinks is not None):
        return "torch's log-sum-exp, needed to merge segments, exists only on the CPU for Dk = Dv"
    return None


def _gives_lse(q: Tensor, view: View) -> bool:
    return q.is_cpu and view.segments[-1].value_width == q.shape[-1]


def run(q: Tensor, view: View, options: Options) -> tuple[Tensor, None]:
    """Attention of q (B, Hq, n, D) over the view, in q's dtype."""
    if not _gives_lse(q, view):
        return _whole(q, view, options), None
    view = view.in_runs()
    if options.slopes is not None:  # every score needs its slope, so nothing is unmasked
        view = view._replace(ragged=True)
    planes = [s.planes[name] for s in view.segments for name in ("k", s.value_name) if s.plain]
    sinks = [] if options.sinks is None else [options.sinks]
    if wants_gradients(q, *planes, *sinks):
        rows = len(q)
        turned = [s.queries(q) for s in view.segments]
        keys = [s.keys(q.dtype, options.centre).expand(rows, -1, -1, -1) for s in view.segments]
        values = [s.values(q.dtype).expand(rows, -1, -1, -1) for s in view.segments]
        places = [s._replace(planes={POSITION: s.planes[POSITION]}) for s in view.segments]
        view = view._replace(segments=tuple(places))
        recorded: Any = _Recorded
        unsunk = options._replace(sinks=None)
        out = recorded.apply(view, unsunk, options.sinks, *turned, *keys, *values)
        return cast(Tensor, out), None
    inputs = (
        (s.queries(q), s.keys(q.dtype, options.centre), s.values(q.dtype)) for s in view.segments
    )
    return _attended(view, options, options.sinks, inputs)[0], None


def _attended(
    view: View,
    options: Options,
    sinks: Tensor | None,
    inputs: Iterable[tuple[Tensor, Tensor, Tensor]],
) -> tuple[Tensor, Tensor]:
    """Attention and its log-sum-exp, (B, Hq, n, D) and fp32 (B, Hq, n, 1). `inputs`: the rotated
    queries, keys and values of each segment."""
    parts, scale = [], options.scale
    for segment, (q, k, v) in zip(view.segments, inputs, strict=True):
        rows, query_heads, n, dim = q.shape
        grouped = q.reshape(rows, k.shape[1], -1, n, dim)
        past, own = _split(view, segment)
        if view.dense:
            if past:
                parts.append(_unmasked(grouped, k[:, :, :past], v[:, :, :past], scale))
            if own:
                parts.append(_causal(grouped, k[:, :, past:], v[:, :, past:], scale))
        elif k.shape[2]:
            parts.append(_masked(grouped, k, v, view, segment, options))
    merged = _merge(parts)
    out, lse = (x.reshape(rows, query_heads, n, -1) for x in merged)
    if sinks is not None:
        sink = sinks.to(lse.dtype).reshape(1, -1, 1, 1)
        out = out * torch.sigmoid(lse - sink).to(out.dtype)
        lse = torch.logaddexp(lse, sink)
    return out, lse


def _split(view: View, segment: Segment) -> tuple[int, int]:
    """For a segment of a dense view: the number of slots that all queries see, and the number of
    the chunk's own slots, where attention is causal. A single query sees its own slot without a
    mask."""
    own = view.chunk if view.chunk > 1 and segment is view.segments[-1] else 0
    return segment.slots - own, own


class _Recorded(torch.autograd.Function):
    """`_attended` with gradients of queries, keys, values and sinks: the kernel's backward computes
    each part's gradients from the merged result and log-sum-exp."""

    @staticmethod
    def forward(
        ctx: Any, view: View, options: Options, sinks: Tensor | None, *inputs: Tensor
    ) -> Tensor:
        count = len(view.segments)
        each = zip(inputs[:count], inputs[count : 2 * count], inputs[2 * count :], strict=True)
        out, lse = _attended(view, options, sinks, each)
        ctx.view, ctx.options = view, options
        ctx.save_for_backward(out, lse, sinks, *inputs)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        out, lse, sinks, *inputs = ctx.saved_tensors
        view, count = ctx.view, len(ctx.view.segments)
        # A query that sees nothing has weights of zero: exp(x - inf) = 0.
        lse = lse.masked_fill(lse == -torch.inf, torch.inf)
        by_kind: list[list[Tensor]] = [[], [], []]
        for index, segment in enumerate(view.segments):
            q, k, v = inputs[index::count]
            rows, _, n, _ = q.shape
            shape = (rows, k.shape[1], -1, n)
            of_queries = [x.reshape(*shape, x.shape[-1]) for x in (q, grad, out, lse)]
            gradients = _gradients(view, segment, of_queries, k, v, ctx.options)
            for kind, gradient in zip(by_kind, gradients, strict=True):
                kind.append(gradient)
        if sinks is not None:
            share = torch.exp(sinks.to(lse.dtype).reshape(1, -1, 1, 1) - lse)
            lost = (grad * out).sum(dim=-1, keepdim=True) * share
            sinks = -lost.sum(dim=(0, 2, 3)).to(sinks.dtype)
        return None, None, sinks, *(gradient for kind in by_kind for gradient in kind)


def _gradients(
    view: View, segment: Segment, of_queries: list[Tensor], k: Tensor, v: Tensor, options: Options
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q (B, H, G, n, D), k and v (B, H, s, D) of a segment. `of_queries`: q, the
    merged result's gradient, the merged result and its log-sum-exp, all (B, H, G, n, ...)."""
    q, scale = of_queries[0], options.scale
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    rows, heads, group, n, _ = q.shape
    past, own = _split(view, segment)
    if view.dense and past:
        folded = [x.reshape(rows, heads, group * n, -1) for x in of_queries]
        found = _kernel_gradients(folded, k[:, :, :past], v[:, :, :past], scale)
        dq += found[0].view_as(q)
        dk[:, :, :past], dv[:, :, :past] = found[1], found[2]
    if view.dense and not own:
        return dq.flatten(1, 2), dk, dv
    calls: Iterable[tuple[slice, Tensor | None]] = [(slice(None), None)]
    if not view.dense:
        past, calls = 0, _masks(q, view, segment, options.slopes)
    k, v = k[:, :, past:], v[:, :, past:]
    for queries, mask in calls:
        for g in range(group):
            own_queries = [x[:, :, g, queries] for x in of_queries]
            own_mask = mask if mask is None else _of_head(mask, g)
            found = _kernel_gradients(own_queries, k, v, scale, own_mask, causal=mask is None)
            dq[:, :, g, queries] += found[0]
            dk[:, :, past:] += found[1]
            dv[:, :, past:] += found[2]
    return dq.flatten(1, 2), dk, dv


def _kernel_gradients(
    of_queries: Sequence[Tensor],
    k: Tensor,
    v: Tensor,
    scale: float,
    mask: Tensor | None = None,
    causal: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q (B, H, m, D), k and v (B, H, s, D). `of_queries`: q, the result's
    gradient, the result and its log-sum-exp."""
    q, grad, out, lse, k, v = (x.contiguous() for x in (*of_queries, k, v))
    gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, lse.squeeze(-1), 0.0, causal, attn_mask=mask, scale=scale
    )
    return cast(tuple[Tensor, Tensor, Tensor], gradients)


def _whole(q: Tensor, view: View, options: Options) -> Tensor:
    """Attention over one segment by torch's public function, which chooses a kernel itself."""
    (segment,) = view.segments
    scale = options.scale
    k, v = segment.keys(q.dtype, options.centre), segment.values(q.dtype)
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
    """q (B, H, m, D) -> out (B, H, m, D), lse (B, H, m); the public function returns no lse."""
    # The kernel assumes, without a check, a stride of 1 along the width.
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal, attn_mask=mask, scale=scale
    )
    return out, lse


def _unmasked(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Partial:
    """Attention of queries that see every slot: the queries of a group (and of all rows, if they
    share the slots) are folded into one query axis."""
    rows, heads, group, n, _ = q.shape
    if k.shape[0] == rows:
        v = v.expand(rows, -1, -1, -1)  # keys differ from row to row by their centres alone
        out, lse = _kernel(q.reshape(rows, heads, group * n, -1), k, v, scale)
        return Partial(out.view(q.shape), lse.reshape(rows, heads, group, n, 1))
    folded = q.transpose(0, 1).reshape(1, heads, rows * group * n, -1)
    out, lse = _kernel(folded, k, v, scale)
    shape = (heads, rows, group, n, -1)
    return Partial(out.view(shape).transpose(0, 1), lse.reshape(shape).transpose(0, 1))


def _causal(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Partial:
    """Causal attention, query i sees slots 0..i: one call per query head of the group, so that keys
    and values are not expanded."""
    rows, group = q.shape[0], q.shape[2]
    k, v = k.expand(rows, -1, -1, -1), v.expand(rows, -1, -1, -1)
    calls = [_kernel(q[:, :, g], k, v, scale, causal=True) for g in range(group)]
    return Partial(
        torch.stack([out for out, _ in calls], dim=2),
        torch.stack([lse for _, lse in calls], dim=2).unsqueeze(-1),
    )


def _masked(
    q: Tensor, k: Tensor, v: Tensor, view: View, segment: Segment, options: Options
) -> Partial:
    """Attention with a mask made from positions, one block of queries at a time."""
    rows, group = q.shape[0], q.shape[2]
    k, v = k.expand(rows, -1, -1, -1), v.expand(rows, -1, -1, -1)
    outs, lses = [], []
    for queries, mask in _masks(q, view, segment, options.slopes):
        calls = [
            _kernel(q[:, :, g, queries], k, v, options.scale, _of_head(mask, g))
            for g in range(group)
        ]
        # The kernel's log-sum-exp of a fully masked row is 0, but its weight must be zero.
        empty = (mask == -torch.inf).all(dim=-1, keepdim=True)
        lse = torch.stack([lse for _, lse in calls], dim=2).unsqueeze(-1)
        outs.append(torch.stack([out for out, _ in calls], dim=2))
        lses.append(lse.masked_fill(empty, -torch.inf))
    return Partial(torch.cat(outs, dim=3), torch.cat(lses, dim=3))


def _masks(
    q: Tensor, view: View, segment: Segment, slopes: Tensor | None
) -> Iterator[tuple[slice, Tensor]]:
    """Additive masks for the scores of a segment, (B|1, 1|H, 1|G, m, s), one block of queries each.
    The query heads of a group share a mask unless they have `slopes`."""
    n = view.chunk
    heads = segment.position.shape[1] if slopes is None else len(slopes)
    block = max(1, _MASKED_SCORES // max(1, len(q) * heads * segment.slots))
    for start in range(0, n, block):
        queries = slice(start, min(n, start + block))
        seen = view.visible(segment, queries)[:, :, None]
        if slopes is None:
            mask = torch.zeros(seen.shape, dtype=q.dtype, device=q.device)
        else:
            distance = view.distances(segment.position, queries)[:, :, None]
            kind = torch.promote_types(q.dtype, torch.float32)
            mask = slopes.to(kind).view(1, *q.shape[1:3], 1, 1) * distance
        yield queries, mask.masked_fill(~seen, -torch.inf)  # of rows that share positions too


def _of_head(mask: Tensor, g: int) -> Tensor:
    """The mask (B|1, 1|H, m, s) of query head g of each group; see `_masks`."""
    return mask[:, :, min(g, mask.shape[2] - 1)]


def _merge(parts: list[Partial]) -> Partial:
    """The sum of the partial outputs, each weighted by its share of the probability."""
    if len(parts) == 1:
        return parts[0]
    lse = torch.stack([part.lse for part in parts])
    total = torch.logsumexp(lse, dim=0)
    weights = torch.exp(lse - total.masked_fill(total == -torch.inf, 0.0))
    out = torch.zeros_like(parts[0].out, dtype=total.dtype)
    for part, weight in zip(parts, weights, strict=True):
        out = torch.addcmul(out, part.out.to(total.dtype), weight)
    return Partial(out.to(parts[0].out.dtype), total)
