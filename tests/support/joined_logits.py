"""What joined texts must give: a model's own forward under the mask that says who sees whom."""

from __future__ import annotations

import torch


def block_diagonal(lengths, tail):
    """Additive mask (1, 1, T, T): each text sees itself, the tail sees all, causally."""
    total = sum(lengths) + tail
    seen = torch.zeros(total, total, dtype=torch.bool)
    start = 0
    for length in lengths:
        seen[start : start + length, start : start + length] = True
        start += length
    seen[start:] = True
    seen &= torch.ones_like(seen).tril()
    return torch.zeros(total, total).masked_fill(~seen, torch.finfo(torch.float32).min)[None, None]


@torch.no_grad()
def expected(model, parts, tail, *, kept=False, window=None):
    """Logits of the tail (1, n) after the parts, by the model without kvkeep.

    `kept`: positions begin at 0 in each part; otherwise they count all tokens. `window`: the tail
    sees so many of the last tokens.
    """
    whole = torch.cat([*parts, tail], dim=1)
    lengths = [part.shape[1] for part in parts]
    mask = block_diagonal(lengths, tail.shape[1])
    place = torch.arange(whole.shape[1])[None]
    if window is not None:
        far = place - place.mT <= -window
        far[: sum(lengths)] = False
        mask = mask.masked_fill(far, torch.finfo(torch.float32).min)
    if kept:
        place = torch.cat([*(torch.arange(n) for n in lengths), place[0, sum(lengths) :]])[None]
    logits = model(whole, attention_mask=mask, position_ids=place, use_cache=False).logits
    return logits[:, -tail.shape[1] :]


@torch.no_grad()
def expected_apart(model, ids, spans, last):
    """Logits (last, V) at the end of ids (1, n), where each span sees itself only."""
    seen = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
    for start, stop in spans:
        seen[start:stop, :start] = False
    mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)[None, None]
    place = torch.arange(ids.shape[1])[None]
    logits = model(ids, attention_mask=mask, position_ids=place, use_cache=False).logits
    return logits[0, -last:]
