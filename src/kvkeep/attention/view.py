"""What attention reads: a view is a list of segments, and facts about who may see what."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from kvkeep.attention.rotation import Rotation
from kvkeep.packing import PLAIN, KernelLayout
from kvkeep.planes import (
    POSITION,
    Chain,
    Planes,
    PlaneSpec,
    Reach,
    along_slots,
    part,
    slot_count,
    unsliced,
)


class Decoder(Protocol):
    """What attention needs of a codec."""

    @property
    def layout(self) -> KernelLayout | None:
        """How the planes lie, for kernels that read them without decoding; None: no kernel can."""

    @property
    def block(self) -> int:
        """Tokens in a slot; their planes have a token axis when it is more than one."""

    def planes(self, dim: int, dtype: torch.dtype) -> dict[str, PlaneSpec]:
        """What one slot of a tensor of width `dim` is in each plane."""

    def width(self, planes: Planes) -> int:
        """D of the tensor that these planes hold."""

    def decode(self, planes: Planes, dtype: torch.dtype) -> Tensor:
        """Planes of S slots -> (B, H, S, D)."""

    def rotate(self, q: Tensor) -> Tensor:
        """Queries (..., D) as the encoded keys need them; decoded keys need them as they are."""


_DECODED_AT_ONCE = 2048
"""Tokens whose keys and values are decoded together by backends that cannot read them encoded."""


class Segment(NamedTuple):
    """A run of slots with one encoding: owned by one cache, or frozen and shared.

    `planes` holds `k*`, `v*` and `position`, batch size B, or 1 when all rows share the segment.
    """

    planes: Planes
    key_codec: Decoder
    value_codec: Decoder
    rotation: Rotation | None = None
    head: int | None = None
    """The one kv head it holds, where heads differ in length; None: all of them."""
    rows: Tensor | None = None
    """The rows it holds, int64 (b,), where rows differ in length; None: all of them."""
    part: bool = False
    """Whether it is all that its rows and head attend to, and others are other rows' or heads'."""
    used: Tensor | None = None
    """How many of its slots, from the first, may not be empty, int32 () where they are: what
    lies behind need not be read. None: any of them."""

    @property
    def slots(self) -> int:
        """Tokens in it."""
        return slot_count(self.planes) * self.key_codec.block

    @property
    def value_width(self) -> int:
        """Dv."""
        return self.value_codec.width(part(self.planes, "v"))

    @property
    def position(self) -> Tensor:
        """Positions int32 (B|1, 1|H, S); -1 marks an empty slot, which nobody sees."""
        return self.planes[POSITION].flatten(2)

    def keys(self, dtype: torch.dtype) -> Tensor:
        """(B|1, H, S, Dk); a view of the planes where the codec allows it."""
        return self.key_codec.decode(part(self.planes, "k"), dtype)

    def placed_keys(self, dtype: torch.dtype) -> Tensor:
        """`keys`, rotated for where they stand."""
        keys = self.keys(dtype)
        return keys if self.rotation is None else self.rotation.turned_keys(keys)

    def values(self, dtype: torch.dtype) -> Tensor:
        """(B|1, H, S, Dv); a view of the planes where the codec allows it."""
        return self.value_codec.decode(part(self.planes, "v"), dtype)

    def queries(self, q: Tensor) -> Tensor:
        """The queries as this segment's decoded keys need them."""
        return q if self.rotation is None else self.rotation.turn(q)

    @property
    def plain(self) -> bool:
        """Whether nothing has to be decoded."""
        return self.key_codec.layout == self.value_codec.layout == PLAIN

    def follows(self, previous: Segment | None) -> bool:
        """Whether this and the segment before it are read as one: a result is then the same, to the
        last bit, as if their slots lay in one place."""
        if previous is None or previous.rotation is not None or self.rotation is not None:
            return False
        a, b = unsliced(previous.planes), unsliced(self.planes)
        return (
            previous.head == self.head
            and previous.key_codec == self.key_codec
            and previous.value_codec == self.value_codec
            and a["k"].shape[0] == b["k"].shape[0]
            and (a["k"].dtype, a["v"].dtype) == (b["k"].dtype, b["v"].dtype)
            and a[POSITION].shape[1] == b[POSITION].shape[1]
        )

    def runs(self, own: int = 0) -> list[Segment]:
        """This segment in runs short enough to decode at once, of which the last holds at least
        its newest `own` tokens; itself, when nothing has to be decoded."""
        block = self.key_codec.block
        slots, step = slot_count(self.planes), max(1, _DECODED_AT_ONCE // block)
        last = slots - -(-own // block)
        if self.plain or slots <= step:
            return [self]
        starts = [*range(0, max(1, last), step)]
        stops = [*starts[1:], slots]
        return [
            self._replace(planes={n: p[:, :, a:b] for n, p in self.planes.items()})
            for a, b in zip(starts, stops, strict=True)
        ]


class Held(NamedTuple):
    """Keys (B, H, S, Dk), values (B, H, S, Dv) and their positions, int32 (B, 1|H, S), -1 where a
    slot is empty: decoded, the oldest first.

    They are views of the slots where nothing had to be decoded or moved: read them before the next
    change, and write to none. `order` says which slot each came from, (B, 1|H, S); None: they stand
    as the slots do.
    """

    keys: Tensor
    values: Tensor
    position: Tensor
    order: Tensor | None = None

    @classmethod
    def of_parts(cls, parts: Sequence[Held], segments: Sequence[Segment]) -> Held:
        """Parts of some rows or one head each side by side, the shorter ones with empty slots in
        front."""
        longest = max(part.position.shape[2] for part in parts)

        def front(x: Tensor, empty: int = 0) -> Tensor:
            return torch.nn.functional.pad(
                x, (0, 0) * (x.dim() - 3) + (longest - x.shape[2], 0), value=empty
            )

        # A part's own slots come first in the order of the slots, the empty ones behind them.
        orders = []
        for held in parts:
            assert held.order is not None
            n = held.order.shape[2]
            empty = torch.arange(n, longest, device=held.order.device)
            empty = empty.expand(*held.order.shape[:2], longest - n)
            orders.append(torch.cat([empty, held.order], dim=2))
        return cls(
            joined_parts([front(held.keys) for held in parts], segments),
            joined_parts([front(held.values) for held in parts], segments),
            joined_parts([front(held.position, -1) for held in parts], segments),
            joined_parts(orders, segments),
        )

    def as_slots(self, x: Tensor) -> Tensor:
        """A number for each of these, (B, H, S), in the order of the slots."""
        if self.order is None:
            return x
        return torch.empty_like(x).scatter_(2, self.order.expand_as(x), x)


def joined_parts(pieces: Sequence[Tensor], segments: Sequence[Segment]) -> Tensor:
    """Pieces (b, h, ...) of a view's parts, alike but for rows and heads, as one (B, H, ...)."""
    if all(segment.rows is None for segment in segments):
        return torch.cat(list(pieces), dim=1)
    own, first = pieces[0].shape[1], segments[0].head
    alike = zip(pieces, segments, strict=True)
    rows = sum(piece.shape[0] for piece, segment in alike if segment.head == first)
    heads = own * len({segment.head for segment in segments})
    whole = pieces[0].new_empty((rows, heads, *pieces[0].shape[2:]))
    for piece, segment in zip(pieces, segments, strict=True):
        head = segment.head or 0
        whole[
            slice(None) if segment.rows is None else segment.rows, head * own : (head + 1) * own
        ] = piece
    return whole


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
        """S over all segments; of the longest part, where heads or rows differ."""
        if self.in_parts:
            return max(segment.slots for segment in self.segments)
        return sum(segment.slots for segment in self.segments)

    @property
    def in_parts(self) -> bool:
        """Whether each segment holds a head or some rows of its own."""
        return self.segments[0].part

    def in_runs(self) -> View:
        """The same view, with encoded segments in runs short enough to decode at once, which do not
        depend on where one segment ends and the next goes on."""
        chains: list[list[Segment]] = []
        for segment in self.segments:
            if chains and not segment.plain and segment.follows(chains[-1][-1]):
                chains[-1].append(segment)
            else:
                chains.append([segment])
        joined = [
            chain[-1]
            if len(chain) == 1
            else chain[-1]._replace(
                planes=Chain([s.planes for s in chain], chain[-1].position.shape[0])
            )
            for chain in chains
        ]
        own = [0] * (len(joined) - 1) + [self.chunk]
        runs = [s.runs(n) for s, n in zip(joined, own, strict=True)]
        return self._replace(segments=tuple(run for some in runs for run in some))

    def in_order(self, key_dtype: torch.dtype, value_dtype: torch.dtype, *, moved: bool) -> Held:
        """Everything, decoded; by position if slots were `moved`, or parts differ in length."""
        if self.in_parts:
            parts = [
                self._replace(segments=(s._replace(head=None, rows=None, part=False),)).in_order(
                    key_dtype, value_dtype, moved=True
                )
                for s in self.segments
            ]
            return Held.of_parts(parts, self.segments)
        rows = self.segments[-1].position.shape[0]
        keys = [segment.placed_keys(key_dtype) for segment in self.segments]
        values = [segment.values(value_dtype) for segment in self.segments]
        k, v = keys[0], values[0]
        if len(keys) > 1:
            k = torch.cat([x.expand(rows, -1, -1, -1) for x in keys], dim=2)
            v = torch.cat([x.expand(rows, -1, -1, -1) for x in values], dim=2)
        place = [segment.position.expand(rows, -1, -1) for segment in self.segments]
        position = torch.cat(place, dim=2) if len(place) > 1 else place[0]
        if not moved:
            return Held(k, v, position)
        order = position.argsort(dim=2, stable=True)
        return Held(
            k.gather(2, along_slots(order, k)),
            v.gather(2, along_slots(order, v)),
            position.gather(2, order),
            order,
        )

    @property
    def dense(self) -> bool:
        """Whether causality within the chunk is all that limits what a query sees."""
        return not (self.ragged or self.reaches)

    def observed(self, newest: int | None) -> Tensor | None:
        """Whose mass counts: bool (B|1, n), the `newest` real queries of each row; None: all."""
        if newest is None or newest >= self.chunk:
            return None
        position = self.position.reshape(-1, self.chunk)
        return (position >= 0) & (position > position.amax(dim=1, keepdim=True) - newest)

    @property
    def square(self) -> bool:
        """Whether these are the first tokens, as they were given, and nothing else limits them."""
        if not self.dense or len(self.segments) > 1 or self.in_parts:
            return False
        return self.segments[0].plain and self.segments[0].slots == self.chunk > 1

    def visible(self, segment: Segment, queries: slice) -> Tensor:
        """Who sees what: bool (B|1, 1|H, len(queries), S of the segment)."""
        return self.sees(segment.position, queries)

    def sees(self, position: Tensor, queries: slice = slice(None)) -> Tensor:
        """Which queries see slots at some positions, int32 (B|1, 1|H, S): bool (B|1, 1|H,
        len(queries), S)."""
        slot = position[:, :, None, :]
        query = self.position.reshape(-1, 1, self.chunk, 1)[:, :, queries]
        seen = (slot >= 0) & (slot <= query)
        for reach in self.reaches:
            seen &= reach.allows(query, slot)
        return seen
