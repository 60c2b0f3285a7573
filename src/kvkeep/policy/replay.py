"""A policy that repeats the recorded decisions of another policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from kvkeep.errors import StateError
from kvkeep.planes import POSITION, Planes, PlaneSpec
from kvkeep.policy.base import Arrivals, Need, Observation
from kvkeep.policy.wrapper import Wrapper

_CURSOR = "replayed"


@final
@dataclass(frozen=True, eq=False)
class ReplayPolicy(Wrapper):
    """Evicts the tokens that `inner` evicted when the same chunks were fed in the same calls. It
    needs neither mass nor queries, because it does not read the slots. Its reach is that of
    `inner`.

    Args:
        decisions: the positions that each call evicted, as `Cursor.evicted` collects them:
            int32 (B, 1|H, count), or for a ragged policy (B, H, S) with -1 for slots that stayed.

    Raises:
        StateError: an eviction differs from the recorded one.
    """

    decisions: Sequence[Tensor] = ()

    name: ClassVar[str] = "replay"
    needs: ClassVar[frozenset[Need]] = frozenset()
    rollback: ClassVar[bool] = False
    counts_empty: ClassVar[bool] = True

    @property
    def planes(self) -> dict[str, PlaneSpec]:
        return {}

    @property
    def observes(self) -> bool:
        return False

    def enter(self, tokens: Arrivals) -> Planes:
        return {}

    def victims(self, count: int, planes: Planes, seen: Observation) -> Tensor:
        position = planes[POSITION]
        assert seen.state is not None
        cursor = seen.state.get(_CURSOR, torch.zeros(len(position), dtype=torch.int64))
        call = int(cursor[0])
        if call >= len(self.decisions):
            raise StateError(
                f"a replay of {len(self.decisions)} evictions is asked for another eviction; feed "
                "the same chunks as when the evictions were recorded"
            )
        chosen = self.decisions[call].to(position.device)
        if self.ragged:
            victims = among(position, chosen) | (position < 0)
        else:
            victims = _slots_of(position, chosen, count)
        seen.state[_CURSOR] = cursor + 1
        return victims


def among(position: Tensor, chosen: Tensor) -> Tensor:
    """Whether the position of each slot (B, 1|H, S) is among `chosen` (B, 1|H, c): a bool mask."""
    wanted = chosen.expand(*position.shape[:2], -1).sort(dim=2).values
    if not wanted.shape[2]:
        return torch.zeros_like(position, dtype=torch.bool)
    at = torch.searchsorted(wanted, position.contiguous()).clamp(max=wanted.shape[2] - 1)
    return wanted.gather(2, at) == position


def _slots_of(position: Tensor, chosen: Tensor, count: int) -> Tensor:
    """The slot of each position in `chosen`, int64 (B, 1|H, count); for -1 any empty slot."""
    if chosen.shape != (*position.shape[:2], count):
        raise StateError(
            f"the recorded eviction has shape {tuple(chosen.shape)} (rows, heads, slots), but now "
            f"{(*position.shape[:2], count)} must be evicted; feed the same chunks in the same rows"
        )
    ordered, slots = position.sort(dim=2, stable=True)
    wanted = chosen.sort(dim=2).values
    # Only empty slots have equal positions: take the first, the second, ... of them.
    rank = torch.arange(count, device=wanted.device) - torch.searchsorted(wanted, wanted)
    at = (torch.searchsorted(ordered, wanted) + rank).clamp(max=position.shape[2] - 1)
    if not ordered.gather(2, at).equal(wanted):
        raise StateError(
            "a token that a replay must evict is not in the cache; feed the same chunks"
        )
    return slots.gather(2, at)
