"""The readable backend: every feature, on any device, float64 when given float64."""

from __future__ import annotations

import torch
from torch import Tensor

from kvkeep.attention.options import Options
from kvkeep.attention.view import View

_SCORES_PER_BLOCK = 1 << 24
"""Most scores held at once; longer chunks are computed in blocks of queries."""


def refuses(q: Tensor, view: View, options: Options) -> str | None:
    """None: the reference does every call."""
    return None


def run(q: Tensor, view: View, options: Options) -> tuple[Tensor, Tensor | None]:
    """Softmax attention over all segments at once, as written in the textbooks.

    Scores and sums are float32 (float64 for float64 input). Source: arXiv 1706.03762; grouped
    queries arXiv 2305.13245; soft capping Gemma 2 (arXiv 2408.00118); sink logits gpt-oss
    (arXiv 2508.10925).
    """
    rows, query_heads, n, _ = q.shape
    compute = torch.promote_types(q.dtype, torch.float32)
    keys = [segment.keys(q.dtype).to(compute) for segment in view.segments]
    values = torch.cat(
        [s.values(q.dtype).to(compute).expand(rows, -1, -1, -1) for s in view.segments], dim=2
    )
    heads = values.shape[1]
    group = query_heads // heads
    turned = [segment.queries(q).to(compute) for segment in view.segments]
    out = q.new_empty(rows, query_heads, n, values.shape[3])
    mass = values.new_zeros(rows, heads, view.slots) if options.need_mass else None
    observed = None if options.observed is None else view.observed(options.observed)

    block = max(1, _SCORES_PER_BLOCK // max(1, rows * query_heads * view.slots))
    for start in range(0, n, block):
        queries = slice(start, min(n, start + block))
        width = queries.stop - start
        scores = torch.cat(
            [
                _scores(t[:, :, queries], k, group, options).masked_fill(
                    ~view.visible(segment, queries)[:, :, None], -torch.inf
                )
                for segment, t, k in zip(view.segments, turned, keys, strict=True)
            ],
            dim=-1,
        )  # (B, H, G, width, S)
        probability = _softmax(scores, options.sinks)
        if mass is not None:
            seen = probability
            if observed is not None:
                seen = seen.masked_fill(~observed[:, None, None, queries, None], 0.0)
            mass += seen.sum(dim=3).mean(dim=2).to(mass.dtype)
        result = torch.einsum("bhgns,bhsd->bhgnd", probability, values)
        out[:, :, queries] = result.reshape(rows, query_heads, width, -1).to(q.dtype)
    return out, mass if mass is None else mass.float()


def _scores(q: Tensor, k: Tensor, group: int, options: Options) -> Tensor:
    """Scaled, capped scores (B, H, G, n, S) of q (B, Hq, n, D) and k (B|1, H, S, D)."""
    rows, _, n, dim = q.shape
    grouped = q.reshape(rows, k.shape[1], group, n, dim)
    scores = torch.einsum("bhgnd,bhsd->bhgns", grouped, k.expand(rows, -1, -1, -1)) * options.scale
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    return scores


def _softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax over the last axis; all zero where everything is -inf. `sinks` (Hq,) are logits that
    take part in the sum and receive nothing."""
    if sinks is not None:
        heads, group = scores.shape[1:3]
        logit = sinks.to(scores.dtype).reshape(1, heads, group, 1, 1)
        scores = torch.cat([scores, logit.expand(*scores.shape[:-1], 1)], dim=-1)
    nothing = (scores == -torch.inf).all(dim=-1, keepdim=True)
    probability = torch.softmax(scores.masked_fill(nothing, 0.0), dim=-1).masked_fill(nothing, 0.0)
    return probability if sinks is None else probability[..., :-1]
