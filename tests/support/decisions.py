"""Two computations of one text, whose sums are rounded differently, and which slots they evict.

Where worths are equal up to rounding, each may evict another slot, and all that follows differs. So
one records what it evicts, the other evicts the same and checks by its own worths that it may.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy

import torch
from torch import Tensor

import kvkeep
from kvkeep.planes import POSITION
from kvkeep.policy import Policy, ranking

Decisions = Sequence[Sequence[Tensor]]
"""The positions that each layer evicted, (B, H, count) for each time."""


def recorded(cache: kvkeep.Cache) -> Decisions:
    """Lists that will hold what layers evict, except where the positions alone decide."""
    kept: list[list[Tensor]] = [[] for _ in cache.layers]
    for layer, decisions in zip(cache.layers, kept, strict=True):
        if hasattr(layer.policy, "score"):
            layer.cursor.evicted = decisions
    return kept


def follow(cache: kvkeep.Cache, decisions: Decisions, rounding: float) -> None:
    """Let each layer evict what another computation evicted. The layers raise AssertionError if
    something that stayed was worth less, by more than the share `rounding` of the largest worth."""
    for layer, own in zip(cache.layers, decisions, strict=True):
        if hasattr(layer.policy, "score"):
            layer.settler.policy = _following(layer.policy, iter(own), rounding)
            layer.plans = False  # native steps follow the rule of the policy's class


def _following(policy: Policy, decisions: Iterator[Tensor], rounding: float) -> Policy:
    other = copy(policy)

    def victims(count, planes, seen):
        position, chosen = planes[POSITION], next(decisions)
        assert chosen.shape == (*position.shape[:2], count)
        evicted = (position[..., None] == chosen[..., None, :]).any(dim=-1)
        assert evicted.sum(dim=2).eq(count).all()
        worth = ranking.worth(policy.score(planes, seen), planes, seen, policy.protection)
        best = worth.masked_fill(~evicted, -torch.inf).amax(dim=2)
        least = worth.masked_fill(evicted, torch.inf).amin(dim=2)
        slack = rounding * worth.masked_fill(worth.isinf(), 0).abs().amax(dim=2)
        assert (best <= least + slack).all(), (best, least)
        return evicted.nonzero()[:, 2].view(chosen.shape)

    def at(fed):
        now = policy.at(fed)
        return other if now is policy else _following(now, decisions, rounding)

    object.__setattr__(other, "victims", victims)
    object.__setattr__(other, "at", at)
    return other
