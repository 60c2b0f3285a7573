"""Hit: a stored prefix of a prompt, with which caches begin."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from kvkeep.cache import Cache
from kvkeep.errors import StateError
from kvkeep.layer.frozen import Run
from kvkeep.layer.history import History
from kvkeep.planes import POSITION, slot_count
from kvkeep.store.geometry import ModelGeometry, planes_of
from kvkeep.store.layer_slices import Stretch
from kvkeep.store.tree import Lock, Match


class Hit(AbstractContextManager["Hit"]):
    """The longest stored prefix of a prompt. It is locked against eviction until the hit is
    released or no longer referenced: call `release`, or use the hit in a `with` statement.

    Attributes:
        length: number of tokens of the prefix; 0 if nothing was found.
        known: number of stored tokens of the prompt. It exceeds `length` if windows or recurrent
            states are not stored after the last of them.
        stretches: the stored slots of the prefix, in order.
    """

    def __init__(self, match: Match, geometry: ModelGeometry | None) -> None:
        self.length, self._state = _usable(match, geometry)
        self.known = match.length
        self._geometry = geometry
        self._lock: Lock | None = match.path[-1].lock() if match.path else None
        self.stretches = _stretches(match, self.length)

    @property
    def border(self) -> int:
        """The number of leading tokens after which a new text should store its windows, so that the
        next text can begin there: `known` if some layers have windows, otherwise `length`."""
        windowed = self._geometry is not None and self._geometry.windowed
        return self.known if windowed else self.length

    def fits(self, cache: Cache) -> bool:
        """Whether the layers of a cache have the same planes."""
        geometry = self._geometry
        if geometry is None or not self.length or len(cache.layers) != len(geometry.layers):
            return False
        if bool(cache.carried) != bool(geometry.states):
            return False
        return all(
            planes_of(layer, own.of_row) == own.planes
            and not (layer.policy.per_head or layer.policy.planes)  # scores are not stored
            for layer, own in zip(cache.layers, geometry.layers, strict=True)
        )

    def fill(self, cache: Cache) -> None:
        """Fill an empty cache with the prefix, without copying. The cache keeps the slots even if
        the store evicts the entry.

        Raises:
            StateError: the cache is not empty, or its specs differ from the entry's.
        """
        if cache.fed:
            raise StateError(
                f"this cache holds {cache.fed} tokens; give an empty cache, or reset() it"
            )
        geometry = self._geometry
        if not self.length or geometry is None:
            return
        if not self.fits(cache):
            raise StateError(
                f"a hit of {geometry}, for a cache of {len(cache.layers)} layers, "
                f"{cache.layers[0].kind}; build the cache with the specs of the stored entry"
            )
        for index, (layer, own) in enumerate(zip(cache.layers, geometry.of_rows, strict=True)):
            history = History()
            history.columns, history.geometry = self.length, own
            first = int(geometry.layers[index].needed(torch.tensor(self.length)))
            history.floor = self.length if first else 0
            found = (one.planes_between(index, first, one.stop) for one in self.stretches)
            layer.cursor.adopt_frozen(history, [Run.of(x) for x in found if slot_count(x)])
        specs = geometry.states
        state = {name: x.to(specs[name].device) for name, x in self._state.items()}
        cache.carried.restore(state, self.length)
        cache.routed = geometry.routed

    def release(self) -> None:
        """Unlock the prefix, so that the store may evict it."""
        self._lock = None

    def __exit__(self, *error: object) -> None:
        self.release()


def _usable(match: Match, geometry: ModelGeometry | None) -> tuple[int, Mapping[str, Tensor]]:
    """The most matched tokens with which a cache can begin, and the recurrent states after them.
    After these tokens, all layers with sliding windows must have the slots in their windows, and
    recurrent states, if the model has any, must be stored."""
    if geometry is None:
        return 0, {}
    ends = _with_windows(match, geometry)
    if not geometry.states:
        return int(ends.nonzero()[-1]), {}
    marks = match.marks
    length = max((at for at in marks if at <= match.length and ends[at]), default=0)
    return length, marks.get(length, {})


def _with_windows(match: Match, geometry: ModelGeometry) -> Tensor:
    """Whether all layers have the slots that a hit of i tokens needs; bool (length + 1,), indexed
    by i."""
    numbers = torch.arange(match.length + 1)
    found = torch.ones(match.length + 1, dtype=torch.bool)
    contents = [node.content for node in match.path]
    for index, layer in enumerate(geometry.layers):
        whole = all(slot_count(one.layers[index]) == len(one) for one in contents)
        if layer.window is None or whole:
            continue
        missing = torch.ones(match.length + 1, dtype=torch.bool)
        for one in contents:
            held = one.layers[index][POSITION].flatten().cpu()
            missing[held[held < match.length]] = False
        # The last missing position before each number of tokens; -1: none is missing.
        last = torch.where(missing, numbers, -1).cummax(dim=0).values.roll(1)
        last[0] = -1
        found &= last < layer.needed(numbers)
    return found


def _stretches(match: Match, length: int) -> list[Stretch]:
    """The stretches of a match's first `length` tokens, in order; nothing is copied."""
    contents = (node.content for node in match.path if node.content.first < length)
    return [one.head(min(len(one), length - one.first)) for one in contents]
