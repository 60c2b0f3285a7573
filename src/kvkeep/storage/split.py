"""Split: a storage in parts of different lengths, by groups of rows, by heads, or both."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, NamedTuple, final

import torch
from torch import Tensor

from kvkeep.errors import OutOfMemoryError
from kvkeep.planes import POSITION, Planes, slot_count, take
from kvkeep.storage.allocate import SHORTAGE
from kvkeep.storage.base import Storage

MOST_EMPTY = 1.15
"""Rows that share a storage are parted if it has more slots per token than this."""


class Part(NamedTuple):
    """A storage for some rows and heads. `rows`: indices of its rows, int64 (b,), ascending; None:
    all rows. `head`: its kv head; None: all heads."""

    storage: Storage
    rows: Tensor | None = None
    head: int | None = None

    def of(self, x: Tensor) -> Tensor:
        """Select this part's rows and head from x (B|1, H|1, ...)."""
        if self.rows is not None and x.shape[0] > 1:
            x = x.index_select(0, self.rows)
        if self.head is not None and x.shape[1] > 1:
            x = x.narrow(1, self.head, 1)
        return x

    def put(self, x: Tensor, whole: Tensor, start: int = 0) -> None:
        """Write x, (b, h, n, ...), to this part's rows and head of `whole`, (B, H, S, ...),
        starting at slot `start`."""
        if self.head is not None and whole.shape[1] > 1:
            whole = whole.narrow(1, self.head, 1)
        whole = whole.narrow(2, start, x.shape[2])
        if self.rows is None:
            whole.copy_(x)
        else:
            whole.index_copy_(0, self.rows.to(x.device), x)


@final
class Padded(Planes):
    """The planes of all parts as one set (B, H, S, ...). A plane is copied when it is first read.

    Shorter parts are padded to the length of the longest: with zeros, and with -1 in the position
    plane.

    Args:
        parts: at least one part.
        rows: B.
        before: put the padding in front of a part's slots instead of behind them.
        resting: copy from `Storage.resting` instead of `Storage.read`.
    """

    def __init__(
        self, parts: Sequence[Part], rows: int, *, before: bool = False, resting: bool = False
    ) -> None:
        self._parts = [
            (part, part.storage.resting() if resting else part.storage.read()) for part in parts
        ]
        self._rows, self._before = rows, before
        self._heads = max((part.head or 0 for part in parts), default=0) + 1
        self._whole: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._whole:
            first = self._parts[0][1][name]
            heads = first.shape[1] if self._parts[0][0].head is None else self._heads
            longest = max(slot_count(planes) for _, planes in self._parts)
            shape = (self._rows, heads, longest, *first.shape[3:])
            whole = first.new_full(shape, -1 if name == POSITION else 0)
            for part, planes in self._parts:  # host storage allows only one read at a time
                part.put(planes[name], whole, (longest - slot_count(planes)) * self._before)
            self._whole[name] = whole
        return self._whole[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts[0][1])

    def __len__(self) -> int:
        return len(self._parts[0][1])


@final
class Split(Storage):
    """One storage for each group of rows of similar lengths, for each kv head, or both. `length` is
    the length of the longest part.

    New slots are appended to all parts; each part frees slots independently.

    Args:
        each: an empty storage; each part gets an empty copy of it.
        by_head: whether each head has separate parts.
    """

    name: ClassVar[str] = "split"

    def __init__(self, each: Storage, *, by_head: bool) -> None:
        super().__init__()
        self._each, self.by_head = each, by_head
        self.differentiable = each.differentiable  # type: ignore[misc]
        self.parts: tuple[Part, ...] = ()
        self.torn = False  # whether a change failed after changing some parts
        self.batch = 0  # B

    @property
    def storages(self) -> tuple[Storage, ...]:
        """The storages of the parts."""
        return tuple(part.storage for part in self.parts)

    @property
    def length(self) -> int:
        return max((storage.length for storage in self.storages), default=0)

    @property
    def capacity(self) -> int:
        return max((storage.capacity for storage in self.storages), default=0)

    @property
    def reallocations(self) -> int:  # type: ignore[override]
        return sum(storage.reallocations for storage in self.storages)

    def append(self, planes: Planes) -> slice:
        start, former = self.length, self.parts
        if not former:
            rows, heads = planes["k"].shape[:2]
            own = range(heads) if self.by_head else (None,)
            self.parts = tuple(Part(self._each.empty_copy(), None, head) for head in own)
            self.batch = rows
        before = [storage.length for storage in self.storages]
        try:
            for part in self.parts:
                part.storage.append({name: part.of(plane) for name, plane in planes.items()})
        except OutOfMemoryError:  # append to all parts or to none
            for storage, length in zip(self.storages, before, strict=True):
                storage.truncate(min(storage.length, length))
            self.parts = former
            raise
        return slice(start, start + slot_count(planes))

    def write(self, slots: Tensor, planes: Planes) -> None:
        for part in self.parts:
            own = {name: part.of(plane) for name, plane in planes.items()}
            part.storage.write(part.of(slots), own)

    def read(self) -> Planes:
        """Copies of all parts, shorter parts padded at the end."""
        return Padded(self.parts, self.batch)

    def resting(self) -> Planes:
        """Copies of all parts, shorter parts padded in front, so that the newest slots are last."""
        return Padded(self.parts, self.batch, before=True, resting=True)

    def copied_to(self, each: Storage) -> Split:
        """A copy of all parts in empty copies of `each`. If `each` is differentiable, gradients
        flow through the copy."""
        other = Split(each, by_head=self.by_head)
        other.batch = self.batch
        other.parts = tuple(part._replace(storage=each.empty_copy()) for part in self.parts)
        for mine, its in zip(self.storages, other.storages, strict=True):
            its.append(mine.read())
        return other

    def write_plane(self, name: str, plane: Tensor) -> None:
        for part in self.parts:
            part.storage.write_plane(name, part.of(plane)[:, :, : part.storage.length])

    def drop(self, dropped: Tensor) -> None:
        """Empty the slots where `dropped`, bool (B|1, H|1, S), is True. Then each part frees the
        number of slots that are empty in all its rows and heads."""
        self.torn = True
        for part in self.parts:
            storage = part.storage
            gone = part.of(dropped)[:, :, : storage.length]
            position = storage.read()[POSITION].masked_fill(gone, -1)
            storage.write_plane(POSITION, position)
            live = position >= 0
            empty = int((~live).sum(dim=2).amin()) if live.numel() else 0
            if empty:
                order = live.to(torch.uint8).argsort(dim=2, stable=True)
                storage.evict(order[:, :, :empty])
        self.torn = False

    @property
    def whole(self) -> Storage | None:
        """The storage of the only part, if that part holds all rows and heads; otherwise None."""
        one = len(self.parts) == 1 and not self.by_head
        return self.parts[0].storage if one else None

    def evict(self, victims: Tensor) -> None:
        for part in self.parts:
            part.storage.evict(part.of(victims))

    def truncate(self, length: int) -> None:
        fewer = self.length - length
        for storage in self.storages:
            storage.truncate(max(0, storage.length - fewer))

    def rows(self, index: Tensor) -> None:
        parts = []
        for part in self.parts:
            own = index
            if part.rows is not None:
                place = torch.full((self.batch,), -1, dtype=torch.int64, device=index.device)
                place[part.rows] = torch.arange(len(part.rows), device=index.device)
                mine = (place[index] >= 0).nonzero().flatten()
                if not len(mine):
                    continue
                own = place[index[mine]]
                part = part._replace(rows=_some(mine, len(index)))
            part.storage.rows(own)
            self.torn = True  # until all parts have their new rows
            parts.append(part)
        self.parts, self.batch, self.torn = tuple(parts), len(index), False

    def reset(self) -> None:
        self.parts, self.batch, self.torn = (), 0, False

    def share(self, common: dict[str, Any]) -> None:
        self._each.share(common)

    def _alike(self) -> Split:
        return Split(self._each, by_head=self.by_head)

    @property
    def live_bytes(self) -> int:
        return sum(storage.live_bytes for storage in self.storages)

    @property
    def nbytes(self) -> int:
        return sum(storage.nbytes for storage in self.storages)


def _some(rows: Tensor, count: int) -> Tensor | None:
    """`rows`, ascending indices below `count`; None if these are all indices."""
    return None if len(rows) == count else rows


def parted(planes: Planes, each: Storage, *, by_head: bool) -> Split | None:
    """Copy slots to parts, each for rows with similar numbers of tokens. A part has as many slots
    as its longest row has tokens; shorter rows have empty slots in front. Tokens keep their order.

    Args:
        planes: (B, H|1, S, ...).
        each: an empty storage; each part gets an empty copy of it.
        by_head: whether to group the rows of each head separately.

    Returns:
        The parts; None if few slots are empty, or if there is not enough memory for the copies.
    """
    try:
        return _parted(planes, each, by_head)
    except (OutOfMemoryError, *SHORTAGE):
        return None


def _parted(planes: Planes, each: Storage, by_head: bool) -> Split | None:
    live = planes[POSITION] >= 0
    rows, _, slots = live.shape
    counts = live.sum(dim=2)
    if not by_head:
        counts = counts.amax(dim=1, keepdim=True)
    lists: list[list[int]] = counts.T.tolist()
    if rows * slots * len(lists) <= MOST_EMPTY * sum(map(sum, lists)):
        return None
    split, parts = Split(each, by_head=by_head), []
    for head, own in enumerate(lists):
        for group in alike(own):
            index = torch.tensor(group, device=live.device)
            part = Part(each.empty_copy(), _some(index, rows), head if by_head else None)
            taken = {name: part.of(planes[name]) for name in planes}
            order = part.of(live).to(torch.uint8).argsort(dim=2, stable=True)
            longest = max(1, *(own[row] for row in group))
            part.storage.append(take(taken, order[:, :, slots - longest :]))
            parts.append(part)
    split.parts, split.batch = tuple(parts), rows
    return split


def loose(storages: Sequence[Storage]) -> bool:
    """Whether storages have more than `MOST_EMPTY` slots per token."""
    places = [storage.read()[POSITION] for storage in storages]
    live = sum(int((place >= 0).sum()) for place in places)
    return sum(place.numel() for place in places) > MOST_EMPTY * live


def alike(counts: Sequence[int]) -> list[list[int]]:
    """Group the indices of `counts`. A group takes, for each of its indices, as many slots as its
    largest count. Groups are split until all groups together take at most `MOST_EMPTY` times the
    sum of `counts`."""
    order = sorted(range(len(counts)), key=lambda index: -counts[index])
    groups, need = [order], sum(counts)

    def held(group: list[int]) -> int:
        return len(group) * counts[group[0]]

    while sum(map(held, groups)) > MOST_EMPTY * need:
        saved, which, cut = max(
            (held(group) - held(group[:cut]) - held(group[cut:]), which, cut)
            for which, group in enumerate(groups)
            for cut in range(1, len(group))
        )
        if not saved:
            break
        groups[which : which + 1] = [groups[which][:cut], groups[which][cut:]]
    return [sorted(group) for group in groups]
