"""What attention reads: a view is a list of segments, and facts about who may see what."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from kvkeep.attention.rotation import Rotation
from kvkeep.planes import POSITION, Planes, Reach, part, slot_count


class Decoder(Protocol):
    """What attention needs of a codec."""

    @property
    def packing(self) -> str | None:
        """The layout of its planes, for a kernel that reads them; None: only `decode` can."""

    def decode(self, planes: Planes, dtype: torch.dtype) -> Tensor:
        """Planes of S slots -> (B, H, S, D)."""

    def rotate(self, q: Tensor) -> Tensor:
        """Queries (..., D) as the encoded keys need them; decoded keys need them as they are."""


class Segment(NamedTuple):
    """A run of slots with one encoding: owned by one cache, or frozen and shared.

    `planes` holds `k*`, `v*` and `position`, batch size B, or 1 when all rows share the segment.
    """

    planes: Planes
    key_codec: Decoder
    value_codec: Decoder
    rotation: Rotation | None = None

    @property
    def slots(self) -> int:
        return slot_count(self.planes)

    @property
    def position(self) -> Tensor:
        """Positions int32 (B|1, 1|H, S); -1 marks an empty slot, which nobody sees."""
        return self.planes[POSITION]

    def keys(self, dtype: torch.dtype) -> Tensor:
        """(B|1, H, S, Dk); a view of the planes where the codec allows it."""
        return self.key_codec.decode(part(self.planes, "k"), dtype)

    def values(self, dtype: torch.dtype) -> Tensor:
        """(B|1, H, S, Dv); a view of the planes where the codec allows it."""
        return self.value_codec.decode(part(self.planes, "v"), dtype)

    def queries(self, q: Tensor) -> Tensor:
        """The queries as this segment's decoded keys need them."""
        return q if self.rotation is None else self.rotation.turn(q)


class View(NamedTuple):
    """The slots that one chunk of queries attends to. Nothing in it is a copy of the past.

    A query at position t sees a slot at position p when 0 <= p <= t and every `reach` allows it.
    A query at position -1 sees nothing and its output is zero.

    Args:
        segments: in any order of positions, except that the chunk's own n slots are the last of
            the last segment, in the order of the queries.
        position: the queries' positions, (n,) when all rows share them or (B, n).
        ragged: whether any slot may be empty or any query see nothing. False promises that every
            slot is live and that the slots before the chunk's own are older than all queries.
        reaches: the limits that matter; one that excludes nothing need not be named.
    """

    segments: tuple[Segment, ...]
    position: Tensor
    ragged: bool = True
    reaches: tuple[Reach, ...] = ()

    @property
    def chunk(self) -> int:
        """n, the number of queries."""
        return self.position.shape[-1]

    @property
    def slots(self) -> int:
        """S over all segments."""
        return sum(segment.slots for segment in self.segments)

    @property
    def dense(self) -> bool:
        """Whether causality within the chunk is all that limits what a query sees."""
        return not (self.ragged or self.reaches)

    def visible(self, segment: Segment, queries: slice) -> Tensor:
        """Who sees what: bool (B|1, 1|H, len(queries), S of the segment)."""
        slot = segment.position[:, :, None, :]
        query = self.position.reshape(-1, 1, self.chunk, 1)[:, :, queries]
        seen = (slot >= 0) & (slot <= query)
        for reach in self.reaches:
            within = query - slot < reach.size
            if reach.sinks:
                within |= slot < reach.sinks
            seen &= within
        return seen

    def observed(self, count: int) -> Tensor:
        """Each row's newest `count` real queries: bool (B|1, n)."""
        position = self.position.reshape(-1, self.chunk)
        newest = position.amax(dim=1, keepdim=True)
        return (position >= 0) & (position > newest - count)
