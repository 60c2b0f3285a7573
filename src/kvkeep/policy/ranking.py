"""Which slots are worth least: the choice that all evicting policies share.

The order is by worth, then by position, the oldest first. Positions, because a slot's index depends
on what was evicted before, in the other rows of a batch too.

Scores are compared to 16 significant bits. Kernels add in an order that depends on the number of
rows, tokens and threads, so two tokens that are worth the same may get scores that differ in their
last bits, in one way in a batch and in another way alone. Without these bits they are equal.
"""

from __future__ import annotations

from struct import Struct
from typing import NamedTuple

import torch
from torch import Tensor

from kvkeep.errors import StateError
from kvkeep.native_library import LIBRARY
from kvkeep.planes import POSITION, Planes
from kvkeep.policy.base import Observation

_RANKING = Struct("=18q")  # KvRanking of native/abi.h
_LAST = 2**31 - 1
_NOISE = 0xFF
"""The bits of a float32 score that are not compared; as in `native/slots.cpp`."""

_MOST = torch.tensor(0x7F7FFFFF & ~_NOISE, dtype=torch.int32).view(torch.float32).item()
"""The largest finite score."""


class Protection(NamedTuple):
    """Slots that are kept whatever they are worth: the newest `recent` positions of a row, its
    first `sinks`, and those from `keep_from` to `keep_to` (exclusive)."""

    recent: int = 0
    sinks: int = 0
    keep_from: int = 0
    keep_to: int = 0

    @property
    def fixed(self) -> int:
        """How many of them do not change as tokens come."""
        return self.sinks + max(0, self.keep_to - max(self.keep_from, self.sinks))


def worth(score: Tensor | None, planes: Planes, seen: Observation, kept: Protection) -> Tensor:
    """Scores fp32 (B, H, S) as they are compared, see `rounded`: infinite for the protected, minus
    infinity for slots that are empty, out of the layer's window, or without a number. None: all are
    alike."""
    position = planes[POSITION]
    if score is None:
        result = torch.zeros(position.shape, device=position.device)
    else:
        result = rounded(score)
    protected = position < kept.sinks
    protected |= (position >= kept.keep_from) & (position < kept.keep_to)
    if kept.recent:
        protected |= position > seen.newest - kept.recent
    dead = position < 0
    if seen.window is not None:  # the next query stands one further
        dead |= position <= seen.newest + 1 - seen.window
    return result.masked_fill(protected, torch.inf).masked_fill(dead, -torch.inf)


def rounded(score: Tensor) -> Tensor:
    """Scores as fp32 of 16 significant bits: the nearest such number, the largest finite one for
    infinity, minus infinity for what is no number."""
    held = score.float().nan_to_num(nan=-torch.inf, neginf=-torch.inf).clamp(max=_MOST)
    return ((held.view(torch.int32) + (_NOISE + 1) // 2) & ~_NOISE).view(torch.float32)


def lowest(worth: Tensor, position: Tensor, count: int) -> Tensor:
    """The `count` slots of the least worth, the oldest first among equals: int64 (..., count)."""
    if count == 1:
        least = worth.amin(dim=-1, keepdim=True)
        return position.masked_fill(worth > least, _LAST).argmin(dim=-1, keepdim=True)
    by_age = position.argsort(dim=-1, stable=True)
    order = worth.gather(-1, by_age).argsort(dim=-1, stable=True)
    return by_age.gather(-1, order[..., :count])


def least_worthy(
    score: Tensor | None, planes: Planes, seen: Observation, kept: Protection, count: int
) -> Tensor:
    """`lowest` of the `worth`, int64 (B, H, count); on the CPU in one call."""
    position = planes[POSITION]
    if count > position.shape[2]:
        raise StateError(
            f"{count} slots to evict of {position.shape[2]}; this is an error of kvkeep"
        )
    if LIBRARY is None or not position.is_cpu or not (score is None or score.is_cpu):
        return lowest(worth(score, planes, seen, kept), position, count)
    rows, heads, slots = position.shape
    if position.stride(2) != 1:
        position = position.contiguous()
    strides, address = (0, 0), 0
    if score is not None:
        if score.shape != position.shape:
            score = score.expand(position.shape).contiguous()
        if score.dtype != torch.float32 or score.stride(2) != 1:
            score = score.float().contiguous()
        strides, address = (score.stride(0), score.stride(1)), score.data_ptr()
    newest, newests = 0, None
    if isinstance(seen.newest, int):
        newest = seen.newest
    else:
        newests = seen.newest.to(torch.int64).contiguous()
    victims = torch.empty((rows, heads, count), dtype=torch.int64)
    ranking = _RANKING.pack(
        address,
        position.data_ptr(),
        0 if newests is None else newests.data_ptr(),
        victims.data_ptr(),
        *strides,
        position.stride(0),
        position.stride(1),
        newest,
        rows,
        heads,
        slots,
        count,
        *kept,
        seen.window or 0,
    )
    if LIBRARY.kv_lowest(ranking):
        raise MemoryError(f"no scratch memory to rank {slots} slots")
    return victims
