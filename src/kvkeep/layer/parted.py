"""ByRows, ByHead: slots of rows or heads of different lengths, each part in its own storage."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy, deepcopy
from typing import Self, final

import torch
from torch import Tensor

from kvkeep.attention import Segment
from kvkeep.errors import SpecError
from kvkeep.layer.frozen import FrozenRuns, Run
from kvkeep.layer.history import History
from kvkeep.layer.slots import Codecs, LayerSlots, on_one_device
from kvkeep.planes import POSITION, Planes, marked, narrowed
from kvkeep.storage import Split, Storage, parted
from kvkeep.storage.split import Padded, Part, loose


class Parted(LayerSlots):
    """Slots in several parts. Attention takes one call for each part.

    Args:
        codecs: encode keys and values.
        split: the parts; this object takes ownership.
        blank: an empty storage from which each part's storage is made.
    """

    storage: Split

    def __init__(self, codecs: Codecs, split: Split, blank: Storage) -> None:
        self.codecs, self.storage, self._blank = codecs, split, blank

    def segments(self) -> tuple[Segment, ...]:
        key, value = self.codecs
        return tuple(
            Segment(part.storage.read(), key, value, head=part.head, rows=part.rows, part=True)
            for part in self.storage.parts
        )

    def positions(self, *, newest_last: bool = False) -> Tensor:
        if not self.storage.parts:
            return torch.empty(0, 1, 0, dtype=torch.int32)
        split = self.storage
        return Padded(split.parts, split.batch, before=newest_last)[POSITION]

    def add(self, k: Tensor, v: Tensor, own: Planes) -> None:
        self.storage.append(self.codecs.encode(k, v) | dict(own))

    def evictable(self) -> Planes:
        """The planes of all parts, padded to one length; a copy."""
        return self.storage.read()

    def write_plane(self, name: str, plane: Tensor) -> None:
        self.storage.write_plane(name, plane)

    def surplus(self, budget: int) -> int:
        longest: dict[int | None, int] = {}
        for part in self.storage.parts:
            longest[part.head] = max(longest.get(part.head, 0), part.storage.length)
        return sum(length - budget for length in longest.values())

    def evict(self, victims: Tensor) -> None:
        if victims.dtype != torch.bool:
            victims = marked(victims, self.storage.length)
        self.storage.drop(victims)

    def free(self, gone: Tensor) -> None:
        if not self.length:
            return
        position = self.storage.read()[POSITION]
        at = position.clamp(min=0).to(torch.int64)
        self.storage.drop(gone.to(at.device).gather(2, at) | (position < 0))

    def free_hidden(self) -> bool:
        self.storage.drop(self.storage.read()[POSITION] < 0)
        self.hidden = 0
        return False

    def mark(self, fewer: int = 0) -> tuple[int, ...]:
        return tuple(storage.length - fewer for storage in self.storage.storages)

    def cut(self, mark: tuple[int, ...]) -> None:
        if not mark:
            self.storage.reset()
        for storage, length in zip(self.storage.storages, mark, strict=False):
            storage.truncate(min(storage.length, length))

    def pack(self) -> LayerSlots | None:
        """As `LayerSlots.pack`. Slots of differentiable storage must not move, because gradients
        need their order."""
        split = self.storage
        if split.differentiable or not split.length or not loose(split.storages):
            return None
        found = parted(split.read(), self._blank, by_head=split.by_head)
        return None if found is None else self._holding(found)

    def take_rows(self, index: Tensor) -> LayerSlots:
        self.storage.rows(index)
        return self._holding(self.storage)

    def _holding(self, split: Split) -> LayerSlots:
        """Take `split` as the new parts; return the object that now holds the slots."""
        self.storage = split
        return self

    def fork(self) -> Self:
        other = copy(self)
        other._blank = deepcopy(self._blank)
        other.storage = self.storage.copied_to(other._blank)
        return other


@final
class ByHead(Parted):
    """Heads of different lengths, for policies that compare all heads of a layer.

    Args:
        codecs: encode keys and values.
        storage: holds the slots of one head; the other heads get empty copies of it. This object
            takes ownership.

    Raises:
        SpecError: the storage is fixed.
    """

    def __init__(self, codecs: Codecs, storage: Storage) -> None:
        if storage.limit is not None:
            raise SpecError(
                f"heads of different lengths need storage that grows, but {storage.name} does not; "
                "use @growing"
            )
        super().__init__(codecs, Split(storage, by_head=True), storage.empty_copy())

    def storage_for(self, n: int, rows: int) -> Storage:
        """See `Undivided.storage_for`."""
        return self.storage

    def parts(self) -> dict[str, Planes]:
        heads = dict.fromkeys(part.head for part in self.storage.parts)
        return {f"head.{head}": _resting_head(self.storage, head) for head in heads}

    def load(self, parts: Mapping[str, Planes], rows: int) -> ByHead:
        self.storage.reset()
        self.hidden = 0
        own = tuple(Part(self._blank.empty_copy(), None, i) for i in range(len(parts)))
        for part in own:
            part.storage.append(on_one_device(parts[f"head.{part.head}"]))
        self.storage.parts, self.storage.batch = own, rows
        return self

    def adopt_frozen(self, runs: Sequence[Run], history: History) -> None:
        dtype = None if history.geometry is None else history.geometry.dtype
        self.load({}, history.rows)
        for planes in FrozenRuns(runs, dtype).placed(self.codecs.key):
            rows = {n: planes[n].expand(history.rows, *planes[n].shape[1:]) for n in planes}
            self.storage.append(rows)


def _resting_head(split: Split, head: int | None) -> Planes:
    """`Split.resting` for one head; without a copy if a single part holds all its rows."""
    own = [part for part in split.parts if part.head == head]
    if len(own) == 1 and own[0].rows is None:
        return own[0].storage.resting()
    alone = [part._replace(head=None) for part in own]
    return Padded(alone, split.batch, before=True, resting=True)


@final
class ByRows(Parted):
    """Rows of different lengths, in at least two parts.

    Args:
        codecs: encode keys and values.
        split: the parts; this object takes ownership.
        blank: an empty storage from which each part's storage is made.
        undivided: makes an `Undivided` from a storage and its number of rows; called when at most
            one part is left.
    """

    def __init__(
        self,
        codecs: Codecs,
        split: Split,
        blank: Storage,
        undivided: Callable[[Storage, int], LayerSlots],
    ) -> None:
        super().__init__(codecs, split, blank)
        self._undivided = undivided

    def _holding(self, split: Split) -> LayerSlots:
        if split.whole is None:
            return super()._holding(split)
        return self._undivided(split.whole, split.batch)

    def parts(self) -> dict[str, Planes]:
        return {"slots": self.storage.resting()}

    def load(self, parts: Mapping[str, Planes], rows: int) -> LayerSlots:
        return self._undivided(self._blank.empty_copy(), 0).load(parts, rows)


def of_heads(planes: Planes, heads: int) -> dict[str, Planes]:
    """Slots of all heads as the parts of `ByHead`."""
    return {f"head.{i}": narrowed(planes, None, i) for i in range(heads)}
