"""Undivided: slots of all rows and heads in one storage, after frozen runs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import replace
from functools import partial
from typing import ClassVar, final

import torch
from torch import Tensor

from kvkeep.attention import Segment
from kvkeep.layer.frozen import FrozenRuns, Run
from kvkeep.layer.history import History
from kvkeep.layer.parted import ByRows
from kvkeep.layer.slots import Codecs, LayerSlots, StepPart, on_one_device
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

    single: ClassVar[bool] = True

    def __init__(
        self, codecs: Codecs, own: Collection[str], storage: Storage, rows: int = 0
    ) -> None:
        self.limit = storage.limit
        self.frozen = FrozenRuns()
        self.codecs, self._own = codecs, own
        self._storage, self._blank = storage, storage.empty_copy()
        self._aside = Concat()
        self._rows = rows  # frozen runs may have batch size 1

    @property
    def storage(self) -> Storage:
        return self._storage

    @property
    def length(self) -> int:
        return self.frozen.length + self._storage.length + self._aside.length

    @property
    def capacity(self) -> int:
        return self.frozen.length + self._storage.capacity

    def stats(self) -> LayerStats:
        found, aside = super().stats(), self._aside.nbytes
        return replace(found, live_bytes=found.live_bytes + aside, nbytes=found.nbytes + aside)

    @property
    def aside(self) -> Planes | None:
        return self._aside.read() if self._aside.length else None

    def segments(self) -> tuple[Segment, ...]:
        key, value = self.codecs
        found = []
        for run in self.frozen.runs:
            planes = run.joined if POSITION in run.own else run.planes
            found.append(Segment(planes, key, value, run.rotation))
        if self._storage.length:
            found.append(Segment(self._storage.read(), key, value))
        if self._aside.length:
            found.append(Segment(self._aside.read(), key, value))
        return tuple(found)

    def positions(self) -> Tensor:
        held = [s.position.expand(self._rows, -1, -1) for s in self.segments()]
        return torch.cat(held, dim=2) if held else torch.empty(0, 1, 0, dtype=torch.int32)

    def step_parts(self) -> tuple[StepPart, ...]:
        if self._aside.length or self.frozen.hides or not self._storage.length:
            return ()
        return (StepPart(self.codecs, self._storage, self.segments()[:-1]),)

    def step_state(self) -> tuple[object, ...]:
        return self._storage, self.frozen, self._aside.length

    def require_room(self, slots: int) -> None:
        self._blank.require(slots)

    def add(self, k: Tensor, v: Tensor, own: Planes) -> None:
        codecs = self.codecs

        def put(slots: Planes) -> None:
            write(k, v, own, slots, *codecs)

        self._rows, n = k.shape[0], k.shape[2]
        storage = self._storage_for(n)
        if not storage.append_in_place(n, put):
            storage.append(codecs.encode(k, v) | dict(own))

    def append(self, planes: Planes) -> None:
        """Append encoded tokens."""
        self._rows = planes[POSITION].shape[0]
        self._storage_for(slot_count(planes)).append(planes)

    def _storage_for(self, n: int) -> Storage:
        """Where to append n tokens; makes room for what stays if they are set aside."""
        room = self.limit is None or self.length + n <= self.limit
        fits = room and (self.frozen.runs or self._storage.make_room(self._storage.length + n))
        return self._storage if fits and not self._aside.length else self._aside

    def evictable(self) -> Planes:
        if not (self.frozen.runs or self._aside.length):
            return self._storage.read()
        links = self._settled
        if self._aside.length:
            links.append(self._aside.read())
        return self._as_one(links)

    def keep(self, name: str, plane: Tensor) -> None:
        if self.frozen.runs or self._aside.length:
            self.write_plane(name, plane)

    def write_plane(self, name: str, plane: Tensor) -> None:
        """Write plane `name` of all slots."""
        storages = [storage for storage in (self._storage, self._aside) if storage.length]
        lengths = [slot_count(run.planes) for run in self.frozen.runs]
        pieces = torch.split(plane, lengths + [storage.length for storage in storages], dim=2)
        for run, piece in zip(self.frozen.runs, pieces, strict=False):
            run.own[name].copy_(piece)
        for storage, piece in zip(storages, pieces[len(lengths) :], strict=True):
            storage.write_plane(name, piece)

    def evict(self, victims: Tensor) -> None:
        if not self.frozen.runs:
            if self._aside.length:
                self._storage.append_evicting(self._aside.read(), victims)
                self._aside.reset()
            else:
                self._storage.evict(victims)
            return
        storage = self._blank.empty_copy()
        storage.append_evicting(self.evictable(), victims)
        self._aside.reset()
        self._storage, self.frozen = storage, FrozenRuns()  # last: memory may run out before

    def hide(self, victims: Tensor, count: int) -> None:
        self.thaw()
        super().hide(victims, count)

    def cut(self, mark: tuple[int, ...]) -> None:
        fewer = max(0, self.length - mark[0])
        for storage in (self._aside, self._storage):
            gone = min(fewer, storage.length)
            storage.truncate(storage.length - gone)  # also undoes an interrupted append
            fewer -= gone
        if fewer:
            left = self.frozen.length - fewer
            self._storage = self._blank.empty_copy(left)
            self.frozen = self.frozen.head(left)

    def pack(self) -> LayerSlots | None:
        """As `LayerSlots.pack`. Slots must not move if there are frozen runs, if the storage is
        fixed, or if it is differentiable: gradients need the order of slots."""
        steady = self._blank.fixed_addresses or self._blank.differentiable
        if steady or self.frozen.runs or not self._storage.length:
            return None
        split = parted(self._storage.read(), self._blank, by_head=False)
        if split is None:
            return None
        if split.whole is None:
            undivided = partial(Undivided, self.codecs, self._own)
            return ByRows(self.codecs, split, self._blank, undivided)
        self._storage = split.whole
        return self

    def take_rows(self, index: Tensor) -> Undivided:
        # Assign only after all copies are made: memory may run out.
        frozen, aside = self.frozen.rows(index), copy(self._aside)
        aside.rows(index)
        self._storage.rows(index)
        self.frozen, self._aside, self._rows = frozen, aside, len(index)
        return self

    def reset(self) -> Undivided:
        if self.frozen.runs:
            self._storage, self.frozen = self._blank.empty_copy(), FrozenRuns()
        self._aside.reset()
        self._storage.reset()
        self.hidden = 0
        return self

    def parts(self) -> dict[str, Planes]:
        found: dict[str, Planes] = {}
        if self.frozen.runs:
            found["slots"] = self._as_one(self._settled)
        elif self._storage.length:
            found["slots"] = self._storage.resting()
        if self._aside.length:
            found["aside"] = self._aside.read()
        return found

    def load(self, parts: Mapping[str, Planes], rows: int) -> Undivided:
        self.reset()
        self._rows = rows
        for name, storage in (("slots", self._storage), ("aside", self._aside)):
            if name in parts:
                storage.append(on_one_device(parts[name]))
        return self

    def adopt_frozen(self, runs: Sequence[Run], history: History) -> None:
        self.reset()
        self._rows = history.rows
        self.frozen = FrozenRuns(runs, None if history.geometry is None else history.geometry.dtype)
        if self._blank.lasting:
            self._storage = self._blank.empty_copy(self.frozen.length)
        else:
            self.thaw()

    def adopt_planes(self, planes: Planes, length: int, rows: int) -> None:
        self._rows = rows
        self._aside.reset()
        self._storage.adopt(planes, length)

    def freeze(self) -> None:
        """Freeze the storage, unless its slots are on the host. A chunk set aside is not frozen."""
        if self._storage.length and self._storage.lasting:
            self.frozen = self.frozen.followed_by(self._storage.read(), self._own)
            self._storage = self._blank.empty_copy(self.frozen.length)

    def fork(self) -> Undivided:
        other = copy(self)
        mine = (self._storage, self._blank, self._aside)  # one deepcopy, as they may share buffers
        other._storage, other._blank, other._aside = deepcopy(mine)
        other.frozen = self.frozen.fork()
        return other

    def thaw(self) -> None:
        if not self.frozen.runs:
            return
        storage = self._blank.empty_copy()
        for planes in self._settled:
            storage.append({n: p.expand(self._rows, *p.shape[1:]) for n, p in planes.items()})
        self._storage, self.frozen = storage, FrozenRuns()  # last, because memory may run out

    @property
    def _settled(self) -> list[Planes]:
        """The planes of all slots except a chunk set aside, the oldest first. Keys of moved runs
        are rotated to their new positions."""
        own = [self._storage.read()] if self._storage.length else []
        return [*self.frozen.placed(self.codecs.key), *own]

    def _as_one(self, runs: list[Planes]) -> Planes:
        """Concatenate runs; a single run that is not frozen is returned without a copy."""
        return Chain(runs, self._rows) if self.frozen.runs or len(runs) > 1 else runs[0]
