"""Attention that computes all weights, for callers that need them or apply dropout."""

from __future__ import annotations

import torch
from torch import Tensor

from kvkeep.attention.options import Options
from kvkeep.attention.reference import biased, received_mass, scores, softmax
from kvkeep.attention.view import View


def run(
    q: Tensor, view: View, options: Options, *, moved: bool, dropout: float = 0.0
) -> tuple[Tensor, Tensor | None, Tensor]:
    """The result of the reference backend, computed by the operations of eager attention: the
    weights are a tensor in q's dtype, in position order, to which dropout is applied. So a seed
    drops the same weights as in the model's own attention.

    Args:
        q: queries (B, Hq, n, Dk).
        view: the slots to attend to.
        moved: whether slots may be out of position order.
        dropout: probability of zeroing a weight; the other weights are scaled up.

    Returns:
        out (B, Hq, n, Dv); the mass, fp32 (B, H, S) in slot order, before dropout, or
        None; the weights (B, Hq, n, S) after dropout.
    """
    rows, query_heads, n, _ = q.shape
    compute = torch.promote_types(q.dtype, torch.float32)
    held = view.in_order(q.dtype, q.dtype, moved=moved, centre=options.centre)
    group = query_heads // held.keys.shape[1]
    seen = view.sees(held.position)
    logits = scores(q.to(compute), held.keys.to(compute), group, options)
    logits = biased(logits, view.distances(held.position), options)
    probability = softmax(logits.masked_fill(~seen[:, :, None], -torch.inf), options.sinks)
    mass = None
    if options.need_mass:
        counted, share = view.observed(options.observed), probability.detach()
        if counted is not None:
            share = share * counted[:, None, None, :, None].to(share.dtype)
        mass = held.as_slots(received_mass(share, options)).float()
    weights = probability.flatten(1, 2).to(q.dtype)
    if dropout:
        weights = torch.nn.functional.dropout(weights, dropout)
    grouped = weights.view_as(probability).to(compute)
    values = held.values.to(compute).expand(rows, -1, -1, -1)
    out = torch.einsum("bhgns,bhsd->bhgnd", grouped, values)
    return out.reshape(rows, query_heads, n, -1).to(q.dtype), mass, weights
