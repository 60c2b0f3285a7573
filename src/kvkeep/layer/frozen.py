"""Frozen slots: never written to, so several caches share them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from copy import deepcopy
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from kvkeep.attention import Rotation
from kvkeep.codec import Codec
from kvkeep.planes import POSITION, Planes, concatenated, joined, part, plane_bytes, slot_count
from kvkeep.storage import Storage


@final
class FrozenPlanes(dict[str, Tensor]):
    """Planes that are never written to. All copies of a cache share them, also deep copies.

    Their batch size is the cache's B, or 1 if all rows share them.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> FrozenPlanes:
        return self

    @property
    def batch(self) -> int:
        """The batch size: B, or 1 if all rows share the planes."""
        return next(iter(self.values())).shape[0]

    def head(self, slots: int) -> FrozenPlanes:
        """The first `slots` slots."""
        return FrozenPlanes({name: p.narrow(2, 0, slots) for name, p in self.items()})

    def rows(self, index: Tensor) -> FrozenPlanes:
        """Row i becomes row index[i]; the same planes if all rows share them."""
        if self.batch == 1:
            return self
        return FrozenPlanes({name: p.index_select(0, index) for name, p in self.items()})


class Run(NamedTuple):
    """A run of frozen slots.

    Caches share `planes`. Each layer has its own copy of the planes in `own`: the planes that a
    policy changes, and the positions if slots were moved or hidden. `rotation` turns keys from the
    positions at which they were computed to the slots' positions; None: the slots were not moved,
    or keys are not rotated.
    """

    planes: FrozenPlanes
    own: dict[str, Tensor]
    rotation: Rotation | None = None
    hides: bool = False  # whether some slots are hidden, at position -1

    @classmethod
    def of(cls, planes: Planes, rotation: Rotation | None = None) -> Run:
        """A run of `planes`; with a rotation, its slots are moved by the rotation's offset."""
        if rotation is None:
            return cls(FrozenPlanes(planes), {})
        place = planes[POSITION]
        moved = torch.where(place < 0, place, place + rotation.offset)
        rest = {name: planes[name] for name in planes if name != POSITION}
        return cls(FrozenPlanes(rest), {POSITION: moved}, rotation if rotation.turns else None)

    @property
    def joined(self) -> Planes:
        """All planes, shared and own."""
        return {**self.planes, **self.own}

    def without(self, positions: Tensor) -> Run:
        """The same run, with the slots at `positions`, (n,), hidden."""
        place = self.joined[POSITION]
        hidden = place.masked_fill(torch.isin(place, positions.to(place)), -1)
        rest = {name: self.planes[name] for name in self.planes if name != POSITION}
        own = self.own | {POSITION: hidden}
        return self._replace(planes=FrozenPlanes(rest), own=own, hides=True)

    def merges_with(self, following: Run) -> bool:
        """Whether the two runs should become one: this run is less than twice as long as the next,
        both have the same batch size, and neither has moved or hidden slots."""
        short = slot_count(self.planes) < 2 * slot_count(following.planes)
        own = POSITION in self.own or POSITION in following.own
        return short and not own and self.planes.batch == following.planes.batch

    def followed_by(self, following: Run) -> Run:
        """Both runs as one, copied."""
        planes = FrozenPlanes(concatenated(self.planes, following.planes))
        return Run(planes, concatenated(self.own, following.own))

    def head(self, slots: int) -> Run:
        """The first `slots` slots."""
        own = {name: plane[:, :, :slots] for name, plane in self.own.items()}
        return self._replace(planes=self.planes.head(slots), own=own)


@final
class FrozenRuns:
    """A layer's frozen runs, the oldest first. Only the planes in `Run.own` are changed.

    Args:
        runs: the oldest first.
        key_dtype: the dtype in which rotated keys are encoded again; None: no run is rotated.
    """

    def __init__(self, runs: Iterable[Run] = (), key_dtype: torch.dtype | None = None) -> None:
        self.runs = tuple(runs)
        self.length = sum(slot_count(run.planes) for run in self.runs)  # in slots
        self.hides = any(run.hides for run in self.runs)  # whether some slots are hidden
        self._key_dtype = key_dtype

    @property
    def shared_bytes(self) -> int:
        """Bytes that other caches may share; a run shared by all rows counts once."""
        return sum(plane_bytes(run.planes) for run in self.runs)

    @property
    def nbytes(self) -> int:
        """All bytes, including each layer's own planes."""
        return self.shared_bytes + sum(plane_bytes(run.own) for run in self.runs)

    def followed_by(self, planes: Planes, own: Collection[str]) -> FrozenRuns:
        """These runs and a new run of `planes`. The planes named in `own` are copied, because a
        policy changes them."""
        mine = {name: planes[name].clone() for name in own}
        shared = {name: planes[name] for name in planes if name not in mine}
        runs = [*self.runs, Run(FrozenPlanes(shared), mine)]
        # Each run costs attention time, so short runs are merged. The oldest runs are the longest.
        while len(runs) > 1 and runs[-2].merges_with(runs[-1]):
            last = runs.pop()
            runs[-1] = runs[-1].followed_by(last)
        return FrozenRuns(runs, self._key_dtype)

    def placed(self, codec: Codec, *behind: Storage) -> list[Planes]:
        """The planes of each run without hidden slots, with keys rotated for their positions; then
        those of the storages `behind` that hold slots."""
        placed: list[Planes] = []
        for run in self.runs:
            planes = run.joined
            if run.rotation is not None:
                keys = codec.decode(part(planes, "k"), torch.float32)
                turned = run.rotation.turned_keys(keys).to(self._key_dtype)
                planes = {**planes, **joined(codec.encode(turned), "k")}
            if run.hides:
                seen = (planes[POSITION][0, 0] >= 0).nonzero().flatten()
                planes = {name: plane.index_select(2, seen) for name, plane in planes.items()}
            placed.append(planes)
        return placed + [storage.read() for storage in behind if storage.length]

    def head(self, slots: int) -> FrozenRuns:
        """The first `slots` slots."""
        runs = []
        for run in self.runs:
            own = min(slots, slot_count(run.planes))
            if own:
                runs.append(run if own == slot_count(run.planes) else run.head(own))
            slots -= own
        return FrozenRuns(runs, self._key_dtype)

    def rows(self, index: Tensor) -> FrozenRuns:
        """Row i becomes row index[i]."""
        return self._each(
            lambda run: run._replace(
                planes=run.planes.rows(index),
                own={name: p.index_select(0, index) for name, p in run.own.items()},
            )
        )

    def fork(self) -> FrozenRuns:
        """The same runs, with copies of the layer's own planes."""
        return self._each(lambda run: run._replace(own=deepcopy(run.own)))

    def _each(self, change: Callable[[Run], Run]) -> FrozenRuns:
        return FrozenRuns(map(change, self.runs), self._key_dtype)
