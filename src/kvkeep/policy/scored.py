"""Policies that value each slot by a score, and keep the best beside some protected ones."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from struct import Struct
from typing import ClassVar

import torch
from torch import Tensor

from kvkeep.errors import SpecError
from kvkeep.library import LIBRARY
from kvkeep.planes import POSITION, Planes, PlaneSpec
from kvkeep.policy.base import Observation, Policy
from kvkeep.policy.window import Window

SCORE = "score"
"""The plane most scored policies keep, fp32 (B, H, S)."""

_LAST = 2**31 - 1


@dataclass(frozen=True)
class Scored(Policy):
    """Keeps `tokens` slots: protected ones, and of the others those with the highest score.

    Protected are the first `sinks` tokens, positions `keep_from` to `keep_to` (exclusive), and the
    newest `protected_recent`. Among equal scores the oldest goes first. A score that is not a
    number counts as the lowest.
    """

    tokens: int
    recent: int | None = None
    sinks: int = 0
    keep_from: int = 0
    keep_to: int = 0

    per_head: ClassVar[bool] = True

    def __post_init__(self) -> None:
        values = (self.sinks, self.keep_from, self.keep_to - self.keep_from, self.protected_recent)
        if min(values) < 0 or not 1 <= self.tokens < 2**31:
            raise SpecError(
                f"{self}: tokens must be at least 1 and below 2**31, recent and sinks at least 0, "
                f"keep_from at most keep_to; write {self.name}:1024"
            )
        if self.protected > self.tokens:
            raise SpecError(
                f"{self.name} keeps {self.tokens} tokens, but protects {self.protected} (the "
                f"newest {self.protected_recent}, sinks and kept positions); use "
                f"{self.name}:{self.protected} or more, or protect fewer"
            )

    @property
    def protected_recent(self) -> int:
        """How many of the newest tokens are never evicted."""
        return self.recent or 0

    @property
    def protected(self) -> int:
        """Most slots that are kept whatever they are worth."""
        fixed = max(self.keep_to, self.sinks) - max(self.keep_from, self.sinks)
        return self.protected_recent + self.sinks + max(0, fixed)

    @property
    def planes(self) -> dict[str, PlaneSpec]:
        return {SCORE: PlaneSpec((), torch.float32, shared=not self.per_head)}

    @property
    def budget(self) -> int:
        return self.tokens

    @property
    def room(self) -> int:
        return 1

    def within(self, window: int) -> Policy:
        return self if self.tokens < window else Window(window)

    def with_budget(self, tokens: int) -> Policy:
        return replace(self, tokens=tokens)

    @abstractmethod
    def score(self, planes: Planes, seen: Observation) -> Tensor:
        """What each slot is worth, floating point (B, H, S); (B, 1, S) unless `per_head`."""

    def worth(self, planes: Planes, seen: Observation) -> Tensor:
        """The score as it is compared: infinite for the protected, minus infinity for slots that
        are empty, out of the layer's window, or without a number."""
        position = planes[POSITION]
        largest = torch.finfo(torch.float32).max
        worth = self.score(planes, seen).nan_to_num(nan=-torch.inf, posinf=largest)
        protected = position > seen.newest - self.protected_recent
        if self.sinks:
            protected |= position < self.sinks
        if self.keep_to > self.keep_from:
            protected |= (position >= self.keep_from) & (position < self.keep_to)
        worth = worth.masked_fill(protected, torch.inf)
        dead = position < 0
        if seen.window is not None:  # the next query stands one further
            dead |= position <= seen.newest + 1 - seen.window
        return worth.masked_fill(dead, -torch.inf)

    def victims(self, count: int, planes: Planes, seen: Observation) -> Tensor:
        position = planes[POSITION]
        if LIBRARY is None or not position.is_cpu:
            return lowest(self.worth(planes, seen), position, count)
        return self._compiled(self.score(planes, seen), position, count, seen)

    def _compiled(self, score: Tensor, position: Tensor, count: int, seen: Observation) -> Tensor:
        """`lowest` of the `worth`, in one call."""
        assert LIBRARY is not None
        rows, heads, slots = position.shape
        score = score if score.dtype == torch.float32 else score.float()
        score, position = (x if x.stride(2) == 1 else x.contiguous() for x in (score, position))
        newest = torch.as_tensor(seen.newest).to(dtype=torch.int64).flatten()
        victims = torch.empty((rows, heads, count), dtype=torch.int64)
        ranking = _RANKING.pack(
            score.data_ptr(),
            position.data_ptr(),
            newest.data_ptr(),
            victims.data_ptr(),
            *score.stride()[:2],
            *position.stride()[:2],
            int(newest.shape[0] > 1),
            rows,
            heads,
            slots,
            count,
            self.protected_recent,
            self.sinks,
            self.keep_from,
            self.keep_to,
            seen.window or 0,
        )
        if LIBRARY.kv_lowest(ranking):
            raise MemoryError(f"no scratch memory to rank {slots} slots")
        return victims


_RANKING = Struct("=18q")  # KvRanking of native/abi.h


def lowest(worth: Tensor, position: Tensor, count: int) -> Tensor:
    """The `count` slots of the least worth, the oldest first among equals: int64 (..., count)."""
    if count == 1:
        least = worth.amin(dim=-1, keepdim=True)
        return position.masked_fill(worth > least, _LAST).argmin(dim=-1, keepdim=True)
    by_age = position.argsort(dim=-1, stable=True)
    order = worth.gather(-1, by_age).argsort(dim=-1, stable=True)
    return by_age.gather(-1, order[..., :count])
