"""Storage of heads with different lengths: each head's slots in a storage of their own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from kvkeep.errors import OutOfMemoryError
from kvkeep.planes import POSITION, Planes, slot_count
from kvkeep.storage.base import Storage


@final
class Padded(Planes):
    """The planes of all heads as one set (B, H, S, ...): each is copied when it is first asked for,
    and filled up to the longest head with zeros, positions with -1."""

    def __init__(self, heads: list[Planes]) -> None:
        self._heads = heads
        self._whole: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._whole:
            first = self._heads[0][name]
            longest = max(map(slot_count, self._heads))
            shape = (first.shape[0], len(self._heads), longest, *first.shape[3:])
            whole = first.new_full(shape, -1 if name == POSITION else 0)
            for head, planes in enumerate(self._heads):  # of which one may be read at a time
                whole[:, head : head + 1, : slot_count(planes)] = planes[name]
            self._whole[name] = whole
        return self._whole[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._heads[0])

    def __len__(self) -> int:
        return len(self._heads[0])


@final
class PerHead(Storage):
    """One storage for each kv head, like `each`; `length` is the longest one's.

    Heads grow together and shrink apart. What a head frees is freed, whatever the others hold.
    """

    name: ClassVar[str] = "per_head"

    def __init__(self, each: Storage) -> None:
        super().__init__()
        self._each = each
        self.differentiable = each.differentiable  # type: ignore[misc]
        self.heads: tuple[Storage, ...] = ()

    @property
    def length(self) -> int:
        return max((head.length for head in self.heads), default=0)

    @property
    def capacity(self) -> int:
        return max((head.capacity for head in self.heads), default=0)

    @property
    def reallocations(self) -> int:  # type: ignore[override]
        return sum(head.reallocations for head in self.heads)

    def append(self, planes: Planes) -> slice:
        start, count = self.length, planes["k"].shape[1]
        former = self.heads
        self.heads = former or tuple(self._each.another() for _ in range(count))
        before = [head.length for head in self.heads]
        try:
            for index, head in enumerate(self.heads):
                head.append({name: plane[:, index : index + 1] for name, plane in planes.items()})
        except OutOfMemoryError:  # all of them or none
            for head, length in zip(self.heads, before, strict=True):
                head.truncate(min(head.length, length))
            self.heads = former
            raise
        return slice(start, start + slot_count(planes))

    def write(self, slots: Tensor, planes: Planes) -> None:
        for index, head in enumerate(self.heads):
            own = {name: plane[:, index : index + 1] for name, plane in planes.items()}
            head.write(slots[:, index : index + 1], own)

    def read(self) -> Planes:
        """Copies, filled up to the longest head."""
        return Padded([head.read() for head in self.heads])

    def load(self, heads: Sequence[Planes]) -> None:
        """Hold copies of these slots, one set for each head."""
        self.heads = tuple(self._each.another() for _ in heads)
        for head, planes in zip(self.heads, heads, strict=True):
            head.append(planes)

    def keep(self, name: str, plane: Tensor) -> None:
        for index, head in enumerate(self.heads):
            head.keep(name, plane[:, index : index + 1, : head.length])

    def drop(self, dropped: Tensor) -> None:
        """Empty the slots where `dropped`, bool (B, H, S), is True, and free what is then empty in
        all rows of a head."""
        for index, head in enumerate(self.heads):
            gone = dropped[:, index : index + 1, : head.length]
            position = head.read()[POSITION].masked_fill(gone, -1)
            head.keep(POSITION, position)
            live = position >= 0
            empty = int((~live).sum(dim=2).amin()) if len(live) else 0
            if empty:
                order = live.to(torch.uint8).argsort(dim=2, stable=True)
                head.evict(order[:, :, :empty])

    def evict(self, victims: Tensor) -> None:
        for index, head in enumerate(self.heads):
            head.evict(victims[:, min(index, victims.shape[1] - 1)][:, None])

    def truncate(self, length: int) -> None:
        fewer = self.length - length
        for head in self.heads:
            head.truncate(head.length - fewer)

    def rows(self, index: Tensor) -> None:
        for head in self.heads:
            head.rows(index)

    def reset(self) -> None:
        self.heads = ()

    def share(self, common: dict[str, Any]) -> None:
        self._each.share(common)

    def another(self) -> PerHead:
        return PerHead(self._each)

    @property
    def live_bytes(self) -> int:
        return sum(head.live_bytes for head in self.heads)

    @property
    def nbytes(self) -> int:
        return sum(head.nbytes for head in self.heads)
