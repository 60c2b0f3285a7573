"""The reference backend: simple, all features, all devices, float64 included."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from kvkeep.attention.options import Options
from kvkeep.attention.view import View

_SCORES_PER_BLOCK = 1 << 24
"""Most scores in memory at once; longer chunks are computed in blocks of queries."""


def refuses(q: Tensor, view: View, options: Options) -> str | None:
    """None: the reference backend supports every call."""
    return None


def run(q: Tensor, view: View, options: Options) -> tuple[Tensor, Tensor | None]:
    """Softmax attention over all segments at once, by definition.

    Scores and sums are float32 (float64 for float64 input). Source: arXiv 1706.03762; grouped
    queries arXiv 2305.13245; soft capping Gemma 2 (arXiv 2408.00118); sink logits gpt-oss
    (arXiv 2508.10925); slopes ALiBi (arXiv 2108.12409).
    """
    rows, query_heads, n, _ = q.shape
    compute = torch.promote_types(q.dtype, torch.float32)
    view = view.in_runs()
    heads = view.segments[-1].planes["k"].shape[1]
    group = query_heads // heads
    turned = [segment.queries(q).to(compute) for segment in view.segments]
    results = []
    mass: Tensor | None = None
    counted = view.observed(options.observed)

    block = max(1, _SCORES_PER_BLOCK // max(1, rows * query_heads * view.slots))

    def part(queries: slice) -> tuple[Tensor, Tensor | None]:
        logits = torch.cat(
            [
                biased(
                    scores(
                        t[:, :, queries],
                        segment.keys(q.dtype, options.centre).to(compute),
                        group,
                        options,
                    ),
                    view.distances(segment.position, queries),
                    options,
                    queries,
                ).masked_fill(~view.visible(segment, queries)[:, :, None], -torch.inf)
                for segment, t in zip(view.segments, turned, strict=True)
            ],
            dim=-1,
        )  # (B, H, G, m, S)
        probability = softmax(logits, options.sinks)
        received = None
        if options.need_mass:
            share = probability
            if counted is not None:
                share = share * counted[:, None, None, queries, None].to(share.dtype)
            received = received_mass(share.detach(), options)
        result, at = torch.zeros((), dtype=compute, device=q.device), 0
        for segment in view.segments:
            values = segment.values(q.dtype).to(compute).expand(rows, -1, -1, -1)
            share = probability[..., at : at + segment.slots]
            result = result + torch.einsum("bhgns,bhsd->bhgnd", share, values)
            at += segment.slots
        return result.reshape(rows, query_heads, result.shape[3], -1).to(q.dtype), received

    for start in range(0, n, block):
        queries = slice(start, min(n, start + block))
        if block < n and torch.is_grad_enabled():  # keep the scores of one block only
            result, received = checkpoint(part, queries, use_reentrant=False)
        else:
            result, received = part(queries)
        results.append(result)
        if received is not None:
            if mass is not None:
                received = torch.maximum(mass, received) if options.peak else mass + received
            mass = received
    return torch.cat(results, dim=2), mass if mass is None else mass.float()


def received_mass(share: Tensor, options: Options) -> Tensor:
    """The mass (B, H, S) of weights (B, H, G, n, S), which are 0 for queries that do not count."""
    return share.amax(dim=(2, 3)) if options.peak else share.sum(dim=3).mean(dim=2)


def scores(q: Tensor, k: Tensor, group: int, options: Options) -> Tensor:
    """Scaled, capped scores (B, H, G, n, S) of q (B, Hq, n, D) and k (B|1, H, S, D)."""
    rows, _, n, dim = q.shape
    grouped = q.reshape(rows, k.shape[1], group, n, dim)
    found = torch.einsum("bhgnd,bhsd->bhgns", grouped, k.expand(rows, -1, -1, -1)) * options.scale
    if options.softcap is not None:
        found = options.softcap * torch.tanh(found / options.softcap)
    return found


def biased(
    logits: Tensor, distance: Tensor, options: Options, queries: slice = slice(None)
) -> Tensor:
    """Scores (B, H, G, n, S) of some queries plus `Options.slopes` and `Options.bias`, for slots at
    a `distance` (B|1, 1|H, n, S) from the queries."""
    groups, apart = logits.shape[1:3], distance[:, :, None]
    if options.slopes is not None:
        slopes = options.slopes.to(logits.dtype).view(1, *groups, 1, 1)
        logits = logits + slopes * apart
    if options.bias is not None:
        bias = options.bias[:, :, queries].to(logits.dtype)
        bias = bias.reshape(len(bias), *groups, *bias.shape[2:])
        at = (-apart).clamp(0, bias.shape[-1] - 1).expand(logits.shape)
        logits = logits + bias.gather(-1, at.long())
    return logits


def softmax(logits: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax over the last axis; all zero if every logit is -inf. `sinks` (Hq,): logits added to
    the denominator only."""
    if sinks is not None:
        heads, group = logits.shape[1:3]
        logit = sinks.to(logits.dtype).reshape(1, heads, group, 1, 1)
        logits = torch.cat([logits, logit.expand(*logits.shape[:-1], 1)], dim=-1)
    nothing = (logits == -torch.inf).all(dim=-1, keepdim=True)
    probability = torch.softmax(logits.masked_fill(nothing, 0.0), dim=-1).masked_fill(nothing, 0.0)
    return probability if sinks is None else probability[..., :-1]
