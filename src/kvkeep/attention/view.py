"""The input of attention: a view, which lists segments and determines visibility."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from kvkeep.attention.centre import Centre
from kvkeep.attention.rotation import Rotation
from kvkeep.packing import PLAIN, KernelLayout
from kvkeep.planes import (
    LAST,
    POSITION,
    Chain,
    Planes,
    PlaneSpec,
    Reach,
    along_slots,
    by_token,
    narrowed,
    part,
    slot_count,
    unsliced,
)


class Decoder(Protocol):
    """The part of a codec that attention uses."""

    @property
    def layout(self) -> KernelLayout | None:
        """The memory layout for kernels that read the planes; None: no kernel can read them."""

    @property
    def block(self) -> int:
        """Tokens per slot; if more than one, the planes have a token axis."""

    @property
    def of_keys(self) -> bool:
        """Whether values are decoded from the planes of keys."""

    def planes(self, dim: int, dtype: torch.dtype) -> dict[str, PlaneSpec]:
        """The planes of one slot for a tensor of width `dim`."""

    def width(self, planes: Planes) -> int:
        """The width D of the tensor encoded in these planes."""

    def decode(self, planes: Planes, dtype: torch.dtype) -> Tensor:
        """Planes of S slots -> (B, H, S, D)."""

    def rotate(self, q: Tensor) -> Tensor:
        """Queries (..., D) to multiply with encoded keys; decoded keys take unchanged queries."""


_DECODED_AT_ONCE = 2048
"""Tokens decoded at a time, for backends that cannot read encoded planes."""


class Segment(NamedTuple):
    """A run of slots with one encoding, owned by one cache or frozen and shared.

    `planes`: `k*`, `v*` and `position`, with batch size B, or 1 if all rows share the segment.
    There is no `v*` if the values are elements of the keys.
    """

    planes: Planes
    key_codec: Decoder
    value_codec: Decoder
    rotation: Rotation | None = None
    head: int | None = None
    """The segment's only kv head, if heads have different lengths; None: all heads."""
    rows: Tensor | None = None
    """The segment's rows, int64 (b,), if rows have different lengths; None: all rows."""
    part: bool = False
    """Whether the segment serves only its own rows and head; other parts serve other rows or heads.
    Segments behind all parts serve all rows and heads."""
    used: Tensor | None = None
    """Upper bound of the slots in use, int32 () on the slots' device: slots from this index on are
    empty and need not be read. None: unknown."""

    @property
    def slots(self) -> int:
        """Number of tokens that fit the segment, including empty slots."""
        return slot_count(self.planes) * self.key_codec.block

    @property
    def token_planes(self) -> Planes:
        """The planes with one entry per token, or one per block. Slots that hold a block are
        flattened to tokens. The planes may be longer than the segment."""
        planes = unsliced(self.planes)
        return planes if self.key_codec.block == 1 else by_token(planes)

    @property
    def value_name(self) -> str:
        """The plane that holds values."""
        return "k" if self.value_codec.of_keys else "v"

    @property
    def value_width(self) -> int:
        """Dv."""
        return self.value_codec.width(part(unsliced(self.planes), self.value_name))

    @property
    def position(self) -> Tensor:
        """Positions int32 (B|1, 1|H, S); -1 marks an empty slot, which no query sees."""
        return self.planes[POSITION].flatten(2)

    def keys(self, dtype: torch.dtype, centre: Centre | None = None) -> Tensor:
        """(B|1, H, S, Dk); a view of the planes where the codec allows it.

        Args:
            centre: the scales and mean keys that the slots' keys lack, for the segment's rows and
                heads.
        """
        if centre is None:
            return self.key_codec.decode(part(self.planes, "k"), dtype)
        position = self.position
        if self.rotation is not None:  # the keys are still rotated for the earlier positions
            position = position - self.rotation.offset
        wide = torch.promote_types(dtype, torch.float32)
        return centre.added(self.key_codec.decode(part(self.planes, "k"), wide), position).to(dtype)

    def own(self, centre: Centre | None) -> Centre | None:
        """The part of a centre for this segment's rows and heads."""
        if centre is not None and self.rows is not None:
            centre = centre.of_rows(self.rows)
        return centre if centre is None or self.head is None else centre.of_head(self.head)

    def narrowed(self, rows: Tensor | None, head: int | None) -> Segment:
        """The slots of some rows and of one head; None: all."""
        return self._replace(planes=narrowed(self.planes, rows, head))

    def placed_keys(self, dtype: torch.dtype, centre: Centre | None = None) -> Tensor:
        """`keys`, rotated for their positions of use."""
        keys = self.keys(dtype, centre)
        return keys if self.rotation is None else self.rotation.turned_keys(keys)

    def values(self, dtype: torch.dtype) -> Tensor:
        """(B|1, H, S, Dv); a view of the planes where the codec allows it."""
        return self.value_codec.decode(part(self.planes, self.value_name), dtype)

    def queries(self, q: Tensor) -> Tensor:
        """The queries, rotated for this segment's decoded keys."""
        return q if self.rotation is None else self.rotation.turn(q)

    @property
    def plain(self) -> bool:
        """Whether keys and values are stored as floats, so nothing has to be decoded."""
        return self.key_codec.layout == self.value_codec.layout == PLAIN

    def follows(self, previous: Segment | None) -> bool:
        """Whether this segment and `previous` are read as one segment: the result then equals, bit
        for bit, the result of a single segment with the slots of both."""
        if previous is None or previous.rotation is not None or self.rotation is not None:
            return False
        a, b = unsliced(previous.planes), unsliced(self.planes)
        return (
            previous.head == self.head
            and previous.key_codec == self.key_codec
            and previous.value_codec == self.value_codec
            and a["k"].shape[0] == b["k"].shape[0]
            and a["k"].dtype is b["k"].dtype
            and a[self.value_name].dtype is b[self.value_name].dtype
            and a[POSITION].shape[1] == b[POSITION].shape[1]
        )

    def runs(self, own: int = 0) -> list[Segment]:
        """This segment divided into runs short enough to decode at once; the last run holds at
        least the newest `own` tokens. Segments that need no decoding are not divided."""
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
    """Decoded keys (B, H, S, Dk), values (B, H, S, Dv) and their positions, int32 (B, 1|H, S), with
    -1 for empty slots; the oldest first.

    The tensors are views of the slots if nothing was decoded or reordered: read them before the
    next change of the cache, and do not write to them. `order` (B, 1|H, S): the slot index of each
    token; None: the tokens are in slot order.
    """

    keys: Tensor
    values: Tensor
    position: Tensor
    order: Tensor | None = None

    @classmethod
    def of_parts(cls, parts: Sequence[Held], segments: Sequence[Segment]) -> Held:
        """Merge parts, which hold some rows or one head each, in slot order; shorter parts are
        padded with empty slots behind."""
        longest = max(part.position.shape[2] for part in parts)
        wide = [part.widened(longest, behind=True) for part in parts]
        return cls(
            joined_parts([part.keys for part in wide], segments),
            joined_parts([part.values for part in wide], segments),
            joined_parts([part.position for part in wide], segments),
        )

    def widened(self, slots: int, *, behind: bool = False) -> Held:
        """The same tokens in `slots` slots, with empty slots added in front, or `behind`."""
        more = slots - self.position.shape[2]
        if not more:
            return self
        sides = (0, more) if behind else (more, 0)

        def added(x: Tensor, empty: int = 0) -> Tensor:
            beside = (0, 0) * (x.dim() - 3)
            return torch.nn.functional.pad(x, (*beside, *sides), value=empty)

        return Held(added(self.keys), added(self.values), added(self.position, -1))

    def as_slots(self, x: Tensor) -> Tensor:
        """Reorder x (B, H, S), one number per token, to slot order."""
        if self.order is None:
            return x
        return torch.empty_like(x).scatter_(2, self.order.expand_as(x), x)


def joined_parts(pieces: Sequence[Tensor], segments: Sequence[Segment]) -> Tensor:
    """Join tensors (b, h, ...), one for each part of a view, to one tensor (B, H, ...)."""
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
    """The slots that a chunk of queries attends to; the past is not copied.

    A query at position t sees a slot at position p if 0 <= p <= t and every `reach` allows it. With
    `bounds` the condition is first <= p <= last instead, and p >= 0. A query at position -1, or
    with last < 0, sees nothing, and its output is zero.

    Args:
        segments: the slots, in any order of positions; parts come first. Without `bounds`, the last
            n slots of the last segment, or of each part if there are only parts, must be the
            chunk's own, in the order of the queries.
        position: the queries' positions, (n,) if all rows share them, else (B, n).
        ragged: whether a slot may be empty or a query may see nothing. False asserts that every
            slot is live and that all slots before the chunk's own are older than all queries.
        reaches: limits on the slots that a query sees; limits that exclude nothing may be omitted.
        bounds: the first and the last position that each query sees, integers (2, n) or (B, 2, n).
            None: 0 and the query's own.
        chosen: the only positions that each query of a kv head sees, if these limits allow them:
            int32 (B, 1|H, n, c). None: all. Views with `chosen` are not read by kernels.
    """

    segments: tuple[Segment, ...]
    position: Tensor
    ragged: bool = True
    reaches: tuple[Reach, ...] = ()
    bounds: Tensor | None = None
    chosen: Tensor | None = None

    @property
    def chunk(self) -> int:
        """n, the number of queries."""
        return self.position.shape[-1]

    @property
    def slots(self) -> int:
        """S over all segments; of the longest part if heads or rows differ in length."""
        longest = max((segment.slots for segment in self.parts), default=0)
        return longest + sum(segment.slots for segment in self.common)

    @property
    def in_parts(self) -> bool:
        """Whether the first segments hold one head or some rows each."""
        return self.segments[0].part

    @property
    def parts(self) -> tuple[Segment, ...]:
        """The segments that hold one head or some rows each."""
        return tuple(segment for segment in self.segments if segment.part)

    @property
    def common(self) -> tuple[Segment, ...]:
        """The segments that hold all heads and rows."""
        return tuple(segment for segment in self.segments if not segment.part)

    def of_part(self, part: Segment) -> View:
        """The view of the queries of one part's rows and head."""
        rows, head = part.rows, part.head
        position, bounds, chosen = self.position, self.bounds, self.chosen
        if rows is not None and position.dim() == 2 and position.shape[0] > 1:
            position = position.index_select(0, rows)
        if rows is not None and bounds is not None and bounds.dim() == 3 and bounds.shape[0] > 1:
            bounds = bounds.index_select(0, rows)
        if rows is not None and chosen is not None:
            chosen = chosen.index_select(0, rows)
        if head is not None and chosen is not None and chosen.shape[1] > 1:
            chosen = chosen[:, head : head + 1]
        alone = part._replace(head=None, rows=None, part=False)
        return self._replace(
            segments=(alone, *(one.narrowed(rows, head) for one in self.common)),
            position=position,
            bounds=bounds,
            chosen=chosen,
        )

    def in_runs(self) -> View:
        """The same view, with encoded segments divided into runs short enough to decode at once.
        The division does not depend on boundaries between segments of one encoding."""
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
        own = [0] * (len(joined) - 1) + [self.chunk if self.bounds is None else 0]
        runs = [s.runs(n) for s, n in zip(joined, own, strict=True)]
        return self._replace(segments=tuple(run for some in runs for run in some))

    def in_order(
        self,
        key_dtype: torch.dtype,
        value_dtype: torch.dtype,
        *,
        moved: bool,
        centre: Centre | None = None,
    ) -> Held:
        """All slots, decoded; sorted by position if slots were `moved` or the view has parts.

        Args:
            centre: the scales and mean keys that the slots' keys lack.
        """
        held = [
            Held(
                segment.placed_keys(key_dtype, segment.own(centre)),
                segment.values(value_dtype),
                segment.position,
            )
            for segment in self.segments
        ]
        if parts := self.parts:
            held = [Held.of_parts(held[: len(parts)], parts), *held[len(parts) :]]
        k, v, position = held[0][:3]
        if len(held) > 1:
            rows = held[-1].position.shape[0]
            heads = max(one.position.shape[1] for one in held)
            k = torch.cat([one.keys.expand(rows, -1, -1, -1) for one in held], dim=2)
            v = torch.cat([one.values.expand(rows, -1, -1, -1) for one in held], dim=2)
            position = torch.cat([x.position.expand(rows, heads, -1) for x in held], dim=2)
        if not (moved or parts):
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
        """Whether all queries see all slots, except for causality within the chunk."""
        limited = self.bounds is not None or self.chosen is not None
        return not (self.ragged or self.reaches or limited)

    def observed(self, newest: int | None) -> Tensor | None:
        """Queries that count for the mass, bool (B|1, n): each row's `newest` queries; None:
        all."""
        if newest is None or newest >= self.chunk:
            return None
        position = self.position.reshape(-1, self.chunk)
        return (position >= 0) & (position > position.amax(dim=1, keepdim=True) - newest)

    @property
    def square(self) -> bool:
        """Whether the chunk holds all tokens, as floats, under causal attention alone."""
        if not self.dense or len(self.segments) > 1 or self.in_parts:
            return False
        return self.segments[0].plain and self.segments[0].slots == self.chunk > 1

    def visible(self, segment: Segment, queries: slice) -> Tensor:
        """Which slots of a segment each query sees: bool (B|1, 1|H, len(queries), S)."""
        return self.sees(segment.position, queries)

    def sees(self, position: Tensor, queries: slice = slice(None)) -> Tensor:
        """Which of the slots at `position`, int32 (B|1, 1|H, S), each query sees: bool (B|1, 1|H,
        len(queries), S)."""
        slot = position[:, :, None, :]
        query = self.position.reshape(-1, 1, self.chunk, 1)[:, :, queries]
        if self.bounds is None:
            seen = (slot >= 0) & (slot <= query)
        else:
            limits = self.bounds.reshape(-1, 1, 2, self.chunk, 1)[:, :, :, queries]
            seen = (slot >= limits[:, :, 0].clamp(min=0)) & (slot <= limits[:, :, 1])
        for reach in self.reaches:
            seen = seen & reach.allows(query, slot)
        if self.chosen is None:
            return seen
        chosen = self.chosen[:, :, queries].sort(dim=-1).values
        shape = tuple(map(max, seen.shape[:3], chosen.shape[:3]))
        chosen, slot = (x.expand(*shape, -1).contiguous() for x in (chosen, slot.to(chosen.dtype)))
        at = torch.searchsorted(chosen, slot).clamp(max=chosen.shape[-1] - 1)
        return seen & (chosen.gather(-1, at) == slot)

    def distances(self, position: Tensor, queries: slice = slice(None)) -> Tensor:
        """The distance in positions from each query to each slot at `position`, int32 (B|1, 1|H,
        S): int32 (B|1, 1|H, len(queries), S), negative for older slots."""
        query = self.position.reshape(-1, 1, self.chunk, 1)[:, :, queries]
        return position[:, :, None, :] - query.to(position.dtype)


def unbounded(position: Tensor) -> Tensor:
    """The bounds, int32 (2, n) or (B, 2, n), that let queries at `position`, (n,) or (B, n), see
    every position; queries at -1 see none."""
    last = torch.where(position < 0, -1, LAST).to(torch.int32)
    return torch.stack([torch.zeros_like(last), last], dim=-2)
