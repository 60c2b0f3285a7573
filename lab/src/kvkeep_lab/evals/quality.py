"""Perplexity of a text's true continuation, and divergence from the full cache's predictions."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvkeep_lab.evals.intervals import of_mean


@dataclass(frozen=True)
class Quality:
    """Means over all tokens of a continuation, and over rows.

    Args:
        perplexity: exp of the mean negative log-probability of the true tokens.
        kl: KL(full || this) of the predictions, in nats.
        top1: share of predictions whose likeliest token is the full cache's.
        kl_95: the 95 % interval of `kl`; see `intervals.of_mean`.
    """

    perplexity: float
    kl: float
    top1: float
    kl_95: tuple[float, float]


def compare(logits: Iterable[Tensor], full: Iterable[Tensor], ids: Tensor) -> Quality:
    """Score predictions of ids (B, N) against the full cache's.

    Args:
        logits, full: N predictions (B, V) each, of any dtype; computed with in float64.
    """
    loss, kl, agreed = 0.0, list[Tensor](), 0
    for mine, theirs, token in zip(logits, full, ids.T, strict=True):
        log_q, log_p = (torch.log_softmax(x.cpu().double(), -1) for x in (mine, theirs))
        loss -= float(log_q.gather(1, token.cpu()[:, None]).sum())
        # p * log(p / q) is 0 where p is 0; -inf - log_q would make it NaN.
        difference = torch.where(log_p == -torch.inf, 0, log_p - log_q)
        kl.append((log_p.exp() * difference).sum(dim=-1))
        agreed += int((log_q.argmax(dim=-1) == log_p.argmax(dim=-1)).sum())
    count = ids.numel()
    per_token = torch.stack(kl, dim=1)
    return Quality(
        math.exp(loss / count), float(per_token.mean()), agreed / count, of_mean(per_token)
    )
