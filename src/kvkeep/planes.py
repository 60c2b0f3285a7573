"""Planes: the named per-slot tensors of a layer, and operations on all planes at once.

A plane is a tensor (B, H, S, ...): batch rows, kv heads, slots, then the shape of one slot's entry.
A plane shared by all heads has H = 1. Scores, scales and positions are planes too, like keys and
values, so one function moves them all.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeVar, final

import torch
from torch import Tensor

Planes = Mapping[str, Tensor]
"""Plane name -> tensor (B, H|1, S, ...)."""

Slots = slice | Tensor
"""A slice of slots, or int64 indices (B|1, H|1, n) along axis 2."""

POSITION = "position"
"""The positions, a plane of every layer: int32 (B, 1|H, S), negative for an empty slot."""

HOLE = -2
"""Position of an empty slot that counts as a token in the positions of later tokens: of a hidden
token, or of padding after a row's first token."""

LAST = 2**31 - 1
"""Largest position."""


@dataclass(frozen=True)
class PlaneSpec:
    """The shape and dtype of one slot's entry in a plane.

    `shape` is the trailing shape after (B, H, S). `shared` planes have H = 1.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    shared: bool = False

    def slot_bytes(self, heads: int) -> int:
        """Bytes of one slot in one row, over all heads."""
        return math.prod(self.shape) * self.dtype.itemsize * (1 if self.shared else heads)


class Reach(NamedTuple):
    """The positions that a query sees: the last `size`, the query's included, the first `sinks`,
    and positions from `keep_from` to `keep_to` (exclusive)."""

    size: int
    sinks: int = 0
    keep_from: int = 0
    keep_to: int = 0

    @property
    def fixed(self) -> int:
        """Number of positions that stay visible however many tokens are fed."""
        return self.sinks + max(0, self.keep_to - max(self.keep_from, self.sinks))

    def allows(self, query: Any, slot: Any) -> Any:
        """Whether a query at position `query` sees a slot at position `slot`; ints or tensors."""
        kept = (slot >= self.keep_from) & (slot < self.keep_to)
        return (query - slot < self.size) | (slot < self.sinks) | kept


class OwnWindow(int):
    """The sliding window of a model's layer, in tokens, the query's included."""

    named: ClassVar[str] = "a sliding window"

    @property
    def words(self) -> str:
        """The window as text for messages."""
        return f"{self.named} of {self} tokens"

    def behind(self, query: Any) -> Any:
        """The number of tokens that a query at position `query` sees, its own included; an int or
        a tensor, as `query`."""
        return self


class Chunks(OwnWindow):
    """A window that begins at a multiple of its size (chunked attention): a query at position p
    sees the positions from p // size * size on."""

    named = "chunked attention"

    def behind(self, query: Any) -> Any:
        return query % self + 1

    def hides(self, kept: Reach | None, n: int, length: int | None, fed: int) -> bool:
        """Whether the window hides a slot from a query, in rows without padding. Arguments as in
        `limits`."""
        if length is None or fed <= self:
            return length is None
        # A policy with the same reach holds the newest tokens.
        return n > 1 or kept != Reach(self) or length - 1 > (fed - 1) % self


def own_window(size: int | None, chunked: bool = False) -> OwnWindow | None:
    """The window of a size; None: no window."""
    if size is None or isinstance(size, OwnWindow):
        return size
    return Chunks(size) if chunked else OwnWindow(size)


def limits(
    kept: Reach | None, window: OwnWindow | None, n: int, length: int | None, fed: int
) -> tuple[Reach, ...]:
    """The reaches that can hide a slot from some query, computed from host numbers only.

    Args:
        kept: the policy's reach. The policy keeps the newest tokens and the sinks, so a single
            query sees all slots once the layer holds no more slots than the reach allows.
        window: the layer's own sliding window.
        n: tokens of the chunk, the last of `fed` in all.
        length: slots in use; None: the host does not know.
    """
    if kept is None and window is None:
        return ()
    # The layer's own window may have dropped the sinks, and the layer may hold other slots instead.
    newest = n == 1 and kept is not None and kept.keep_to <= kept.keep_from
    newest = newest and not (kept and kept.sinks and window is not None)
    own = None if window is None else Reach(window)
    if isinstance(window, Chunks):  # not a Reach: the visible size differs from query to query
        kept, own = None if kept == own else kept, None
    both = [reach for reach in dict.fromkeys((kept, own)) if reach is not None]
    if length is None:
        return tuple(both)

    def excludes(reach: Reach) -> bool:
        return length > reach.size + reach.sinks if newest else fed > reach.size

    return tuple(reach for reach in both if excludes(reach))


@final
class Front(Planes):
    """The first `length` slots of larger planes; each view is created when first read."""

    def __init__(self, planes: Planes, length: int) -> None:
        self.whole = dict(planes)
        self.length = length
        self._views: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        view = self._views.get(name)
        if view is None:
            view = self._views[name] = self.whole[name].narrow(2, 0, self.length)
        return view

    def __iter__(self) -> Iterator[str]:
        return iter(self.whole)

    def __len__(self) -> int:
        return len(self.whole)


@final
class Chain(Planes):
    """Several runs of slots as one set (B, H, S, ...); a plane is concatenated when first read.

    All rows share a run of batch size 1.
    """

    def __init__(self, links: Sequence[Planes], rows: int) -> None:
        self.lengths = [slot_count(planes) for planes in links]
        self.length = sum(self.lengths)
        self._links, self._rows = links, rows
        self._joined: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        joined = self._joined.get(name)
        if joined is None:
            planes = [planes[name] for planes in self._links]
            planes = [plane.expand(self._rows, *plane.shape[1:]) for plane in planes]
            joined = self._joined[name] = torch.cat(planes, dim=2)
        return joined

    def take(self, index: Tensor) -> dict[str, Tensor]:
        """Like the function `take`, without concatenating the planes."""
        return {name: self._taken(name, index) for name in self}

    def _taken(self, name: str, index: Tensor) -> Tensor:
        found, start = None, 0
        for planes, length in zip(self._links, self.lengths, strict=True):
            if not length:
                continue
            plane = planes[name].expand(self._rows, *planes[name].shape[1:])
            slots = plane.gather(2, along_slots((index - start).clamp(0, length - 1), plane))
            later = along_slots(index >= start, plane)
            found = slots if found is None else torch.where(later, slots, found)
            start += length
        return self[name] if found is None else found

    def __iter__(self) -> Iterator[str]:
        return iter(self._links[-1])

    def __len__(self) -> int:
        return len(self._links[-1])


def part(planes: Planes, prefix: str) -> Planes:
    """The planes of one encoded tensor: for prefix "k", `k` and `k_*`; the prefix is removed."""
    return {
        name[len(prefix) :]: planes[name]
        for name in planes
        if name == prefix or name.startswith(prefix + "_")
    }


Value = TypeVar("Value")


def joined(planes: Mapping[str, Value], prefix: str) -> dict[str, Value]:
    """The inverse of `part`: adds the prefix to each plane's name."""
    return {prefix + name: plane for name, plane in planes.items()}


def along_slots(index: Tensor, plane: Tensor) -> Tensor:
    """Slot indices (B|1, H|1, n), expanded to `plane` (B, H, S, ...) for gather and scatter."""
    trailing = plane.shape[3:]
    index = index.reshape(*index.shape, *(1 for _ in trailing))
    return index.expand(plane.shape[0], plane.shape[1], -1, *trailing)


def take(planes: Planes, index: Tensor) -> dict[str, Tensor]:
    """Copy the slots `index` (B|1, H|1, n) out of every plane, in that order."""
    if type(planes) is Chain:
        return planes.take(index)
    return {name: plane.gather(2, along_slots(index, plane)) for name, plane in planes.items()}


def narrowed(planes: Planes, rows: Tensor | None, head: int | None) -> dict[str, Tensor]:
    """The planes of some rows, int64 (b,), and of one head; None: all. Planes that all rows or
    heads share stay whole; only rows are copied."""

    def own(plane: Tensor) -> Tensor:
        if rows is not None and plane.shape[0] > 1:
            plane = plane.index_select(0, rows)
        return plane if head is None or plane.shape[1] == 1 else plane.narrow(1, head, 1)

    return {name: own(planes[name]) for name in planes}


def concatenated(first: Planes, second: Planes) -> dict[str, Tensor]:
    """Both sets of slots, `first` before `second`, as new tensors."""
    return {name: torch.cat([plane, second[name]], dim=2) for name, plane in first.items()}


def marked(slots: Tensor, length: int) -> Tensor:
    """Slot indices (B|1, H|1, n) as a bool mask (B|1, H|1, length)."""
    mask = torch.zeros(*slots.shape[:2], length, dtype=torch.bool, device=slots.device)
    return mask.scatter_(2, slots, True)


def positions_of(slots: Tensor, planes: Planes) -> Tensor:
    """Positions (B, 1|H, n) of slots given by index; for a bool mask (B, H, S), the positions of
    the marked slots and -1 elsewhere."""
    position = planes[POSITION]
    if slots.dtype == torch.bool:
        return position.masked_fill(~slots, -1)
    return position.gather(2, along_slots(slots, position))


def norms(x: Tensor) -> Tensor:
    """Euclidean norms of vectors (..., D), fp32 (...). The order of additions depends on D only, so
    a vector's norm has the same bits in a batch and alone."""
    found: Tensor = x.float().contiguous().norm(dim=-1)
    return found


def survivors(victims: Tensor, length: int) -> Tensor:
    """Indices of the slots that are not victims, in slot order.

    `victims` is int64 (B|1, H|1, c) without repeats; returns int64 (B|1, H|1, length - c).
    """
    order = torch.sort(marked(victims, length).to(torch.uint8), dim=2, stable=True).indices
    return order[:, :, : length - victims.shape[2]]


def moves(victims: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """How to evict `victims` from `length` slots: copy slots `movers` to slots `holes`. Both are
    int64 of the victims' shape (B|1, H|1, c)."""
    # Victims below `kept` leave holes, and the same number of survivors have an index >= `kept`.
    # With the victims sorted, and the slots from `kept` on sorted with survivors first, hole i
    # takes survivor i. The remaining pairs copy freed slots to freed slots, which has no effect.
    kept = length - victims.shape[2]
    freed = marked(victims, length)[:, :, kept:]
    movers = kept + torch.sort(freed.to(torch.uint8), dim=2, stable=True).indices
    return victims.sort(dim=2).values, movers


def unsliced(planes: Planes) -> Planes:
    """The whole planes of a `Front`, otherwise `planes`: for dtypes, strides and addresses, without
    creating views."""
    return planes.whole if type(planes) is Front else planes


def by_token(planes: Planes) -> Planes:
    """Planes of slots that each hold a block of tokens, with a token axis instead of the slot axis.
    Planes with one entry per block have a block axis. Views, where strides allow it."""
    return {name: plane.flatten(2, 3) for name, plane in planes.items() if plane.dim() > 3}


def slot_count(planes: Planes) -> int:
    """S of a set of planes; 0 if the set is empty."""
    if type(planes) is Front or type(planes) is Chain:  # faster than isinstance of an ABC
        return planes.length
    for plane in planes.values():
        return plane.shape[2]
    return 0


def plane_bytes(planes: Planes) -> int:
    """Bytes of all planes, over all rows, heads and slots."""
    return sum(plane.element_size() * plane.numel() for plane in planes.values())
