"""The ranking by which all evicting policies choose the slots of least worth.

Slots are ordered by worth, then by position, the oldest first. Ties are not broken by slot index,
which depends on earlier evictions in all rows of a batch.

Scores are compared to 16 significant bits. Kernels add in an order that depends on the numbers of
rows, tokens and threads, so equal scores may differ in their last bits; rounding makes them equal.
"""

from __future__ import annotations

from struct import Struct

import torch
from torch import Tensor

from kvkeep.errors import StateError
from kvkeep.native_library import LIBRARY
from kvkeep.planes import LAST, POSITION, Chunks, Planes
from kvkeep.policy.base import Observation
from kvkeep.policy.protection import Protection

RANKING = Struct("=19q")
"""KvRanking of native/abi.h."""

_NOISE = 0xFF
"""The bits of a float32 score that are rounded off, as in `native/slots.cpp`."""

_MOST = torch.tensor(0x7F7FFFFF & ~_NOISE, dtype=torch.int32).view(torch.float32).item()
"""The largest finite score."""


def worth(score: Tensor | None, planes: Planes, seen: Observation, kept: Protection) -> Tensor:
    """The worth of slots, fp32 (B, H, S): the rounded score; infinity for protected slots; minus
    infinity for slots that are empty, outside the layer's window, or have a score of NaN. `score`
    None: all scores are 0."""
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
    if seen.window is not None:  # the next query is at newest + 1
        after = seen.newest + 1
        dead |= position <= after - seen.window.behind(after)
    return result.masked_fill(protected, torch.inf).masked_fill(dead, -torch.inf)


def rounded(score: Tensor) -> Tensor:
    """Scores rounded to 16 significant bits, fp32; infinity becomes the largest finite value, NaN
    minus infinity."""
    held = score.to(torch.float32).nan_to_num(nan=-torch.inf, neginf=-torch.inf).clamp(max=_MOST)
    return ((held.view(torch.int32) + (_NOISE + 1) // 2) & ~_NOISE).view(torch.float32)


def lowest(worth: Tensor, position: Tensor, count: int) -> Tensor:
    """The `count` slots of least worth, among equal worths the oldest first: int64 (..., count)."""
    if count == 1:
        least = worth.amin(dim=-1, keepdim=True)
        return position.masked_fill(worth > least, LAST).argmin(dim=-1, keepdim=True)
    by_age = position.argsort(dim=-1, stable=True)
    order = worth.gather(-1, by_age).argsort(dim=-1, stable=True)
    return by_age.gather(-1, order[..., :count])


def least_worthy(
    score: Tensor | None, planes: Planes, seen: Observation, kept: Protection, count: int
) -> Tensor:
    """`lowest(worth(...))`, int64 (B, H, count); on the CPU one call of the native library."""
    position = planes[POSITION]
    if count > position.shape[2]:
        raise StateError(f"{count} slots to evict of {position.shape[2]}; this is a bug in kvkeep")
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
            score = score.to(torch.float32).contiguous()
        strides, address = (score.stride(0), score.stride(1)), score.data_ptr()
    newest, newests = 0, None
    if isinstance(seen.newest, int):
        newest = seen.newest
    else:
        newests = seen.newest.to(torch.int64).contiguous()
    victims = torch.empty((rows, heads, count), dtype=torch.int64)
    ranking = RANKING.pack(
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
        isinstance(seen.window, Chunks),
    )
    if LIBRARY.kv_lowest(ranking):
        raise MemoryError(f"no scratch memory to rank {slots} slots")
    return victims
