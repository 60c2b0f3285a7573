"""Undivided: slots of all rows and heads in one storage, after frozen runs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import replace
from functools import partial
from typing import final

import torch
from torch import Tensor

from kvkeep.attention import Segment
from kvkeep.layer.frozen import FrozenRuns, Run
from kvkeep.layer.history import History
from kvkeep.layer.parted import ByRows
from kvkeep.layer.slots import Codecs, LayerSlots, on_one_device
from kvkeep.layer.stats import LayerStats
from kvkeep.layer.write_tokens import write
from kvkeep.planes import POSITION, Chain, Planes, slot_count
from kvkeep.storage import Concat, Storage, parted


@final
class Undivided(LayerSlots):
    """Frozen runs, then a storage, then a chunk set aside.

    A frozen run is copied only when one of its slots must be evicted. A chunk is set aside only if
    the storage has no room for it, and only until the policy has evicted.

    Args:
        codecs: encode keys and values.
        own: names of the planes that a policy changes; forks copy these planes.
        storage: holds the slots; this object takes ownership.
        rows: B, if the storage already holds slots.
    """

    def __init__(
        self, codecs: Codecs, own: Collection[str], storage: Storage, rows: int = 0
    ) -> None:
        self.limit = storage.limit
        self.frozen = FrozenRuns()
        self.codecs, self._own = codecs, own
        self.storage, self._blank = storage, storage.empty_copy()
        self.aside = Concat()
        self._rows = rows  # frozen runs may have batch size 1

    @property
    def length(self) -> int:
        return self.frozen.length + self.storage.length + self.aside.length

    @property
    def stats(self) -> LayerStats:
        found, aside = super().stats, self.aside.nbytes
        return replace(found, live_bytes=found.live_bytes + aside, nbytes=found.nbytes + aside)

    def segments(self) -> tuple[Segment, ...]:
        held = [
            (run.joined if POSITION in run.own else run.planes, run.rotation)
            for run in self.frozen.runs
        ]
        held += [(part.read(), None) for part in (self.storage, self.aside) if part.length]
        return tuple(Segment(planes, *self.codecs, rotation) for planes, rotation in held)

    def positions(self, *, newest_last: bool = False) -> Tensor:
        held = [s.position.expand(self._rows, -1, -1) for s in self.segments()]
        return torch.cat(held, dim=2) if held else torch.empty(0, 1, 0, dtype=torch.int32)

    def add(self, k: Tensor, v: Tensor, own: Planes) -> None:
        codecs = self.codecs

        def put(slots: Planes) -> None:
            write(k, v, own, slots, *codecs)

        n = k.shape[2]
        storage = self.storage_for(n, k.shape[0])
        if not storage.append_in_place(n, put):
            storage.append(codecs.encode(k, v) | dict(own))

    def storage_for(self, n: int, rows: int) -> Storage:
        """Where to append n tokens of `rows` rows; makes room for what stays if they are set
        aside."""
        self._rows = rows
        room = self.limit is None or self.length + n <= self.limit
        fits = room and (self.frozen.runs or self.storage.make_room(self.storage.length + n))
        return self.storage if fits and not self.aside.length else self.aside

    def evictable(self) -> Planes:
        if not (self.frozen.runs or self.aside.length):
            return self.storage.read()
        return Chain(self.frozen.placed(self.codecs.key, self.storage, self.aside), self._rows)

    def write_plane(self, name: str, plane: Tensor) -> None:
        if not (self.frozen.runs or self.aside.length):
            if self.storage.read()[name].data_ptr() != plane.data_ptr():
                self.storage.write_plane(name, plane)
            return
        storages = [storage for storage in (self.storage, self.aside) if storage.length]
        lengths = [slot_count(run.planes) for run in self.frozen.runs]
        pieces = torch.split(plane, lengths + [storage.length for storage in storages], dim=2)
        for run, piece in zip(self.frozen.runs, pieces, strict=False):
            if name in run.own:  # otherwise no slot of the run was hidden, so it has not changed
                run.own[name].copy_(piece)
        for storage, piece in zip(storages, pieces[len(lengths) :], strict=True):
            storage.write_plane(name, piece)

    def evict(self, victims: Tensor) -> None:
        if not self.frozen.runs:
            if self.aside.length:
                self.storage.append_evicting(self.aside.read(), victims)
                self.aside.reset()
            else:
                self.storage.evict(victims)
            return
        storage = self._blank.empty_copy()
        storage.append_evicting(self.evictable(), victims)
        self.aside.reset()
        self.storage, self.frozen = storage, FrozenRuns()  # last: memory may run out before

    def cut(self, mark: tuple[int, ...]) -> None:
        fewer = max(0, self.length - mark[0])
        for storage in (self.aside, self.storage):
            gone = min(fewer, storage.length)
            storage.truncate(storage.length - gone)  # also undoes an interrupted append
            fewer -= gone
        if fewer:
            left = self.frozen.length - fewer
            self.storage = self._blank.empty_copy(left)
            self.frozen = self.frozen.head(left)

    def pack(self) -> LayerSlots | None:
        """As `LayerSlots.pack`. Slots must not move if there are frozen runs, if the storage is
        fixed, or if it is differentiable: gradients need the order of slots."""
        steady = self._blank.fixed_addresses or self._blank.differentiable
        if steady or self.frozen.runs or not self.storage.length:
            return None
        split = parted(self.storage.read(), self._blank, by_head=False)
        if split is None:
            return None
        if split.whole is None:
            undivided = partial(Undivided, self.codecs, self._own)
            return ByRows(self.codecs, split, self._blank, undivided)
        self.storage = split.whole
        return self

    def take_rows(self, index: Tensor) -> Undivided:
        # Assign only after all copies are made: memory may run out.
        frozen, aside = self.frozen.rows(index), copy(self.aside)
        aside.rows(index)
        self.storage.rows(index)
        self.frozen, self.aside, self._rows = frozen, aside, len(index)
        return self

    def parts(self) -> dict[str, Planes]:
        found: dict[str, Planes] = {}
        if self.frozen.runs:
            found["slots"] = Chain(self.frozen.placed(self.codecs.key, self.storage), self._rows)
        elif self.storage.length:
            found["slots"] = self.storage.resting()
        if self.aside.length:
            found["aside"] = self.aside.read()
        return found

    def load(self, parts: Mapping[str, Planes], rows: int) -> Undivided:
        if self.frozen.runs:
            self.storage, self.frozen = self._blank.empty_copy(), FrozenRuns()
        self.aside.reset()
        self.storage.reset()
        self.hidden, self._rows = 0, rows
        for name, storage in (("slots", self.storage), ("aside", self.aside)):
            if name in parts:
                storage.append(on_one_device(parts[name]))
        return self

    def adopt_frozen(self, runs: Sequence[Run], history: History) -> None:
        self.load({}, history.rows)
        self.frozen = FrozenRuns(runs, None if history.geometry is None else history.geometry.dtype)
        if self._blank.lasting:
            self.storage = self._blank.empty_copy(self.frozen.length)
        else:
            self.thaw()

    def adopt_planes(self, planes: Planes, length: int, rows: int) -> None:
        self._rows = rows
        self.aside.reset()
        self.storage.adopt(planes, length)

    def freeze(self) -> None:
        """Freeze the storage, unless its slots are on the host. A chunk set aside is not frozen."""
        if self.storage.length and self.storage.lasting:
            self.frozen = self.frozen.followed_by(self.storage.read(), self._own)
            self.storage = self._blank.empty_copy(self.frozen.length)

    def fork(self) -> Undivided:
        other = copy(self)
        mine = (self.storage, self._blank, self.aside)  # one deepcopy, as they may share buffers
        other.storage, other._blank, other.aside = deepcopy(mine)
        other.frozen = self.frozen.fork()
        return other

    def thaw(self) -> None:
        if not self.frozen.runs:
            return
        storage = self._blank.empty_copy()
        for planes in self.frozen.placed(self.codecs.key, self.storage):
            storage.append({n: p.expand(self._rows, *p.shape[1:]) for n, p in planes.items()})
        self.storage, self.frozen = storage, FrozenRuns()  # last, because memory may run out
