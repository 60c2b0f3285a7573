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
from kvkeep.layer.slots import Codecs, LayerSlots, Span, StepPart, on_one_device
from kvkeep.packing import PLAIN
from kvkeep.planes import POSITION, Planes, marked, narrowed
from kvkeep.storage import Split, Storage, parted


class Parted(LayerSlots):
    """Slots in several parts. Attention takes one call for each part.

    Args:
        codecs: encode keys and values.
        split: the parts; this object takes ownership.
        blank: an empty storage from which each part's storage is made.
    """

    def __init__(self, codecs: Codecs, split: Split, blank: Storage) -> None:
        self.codecs, self._split, self._blank = codecs, split, blank

    @property
    def storage(self) -> Storage:
        return self._split

    @property
    def torn(self) -> bool:
        return self._split.torn

    def segments(self) -> tuple[Segment, ...]:
        key, value = self.codecs
        return tuple(
            Segment(part.storage.read(), key, value, head=part.head, rows=part.rows, part=True)
            for part in self._split.parts
        )

    def positions(self) -> Tensor:
        if not self._split.parts:
            return torch.empty(0, 1, 0, dtype=torch.int32)
        return self._split.read()[POSITION]

    def spans(self) -> tuple[Span, ...]:
        """One span of all slots: `positions()` pads the parts to one length."""
        plain, length = all(codec.layout == PLAIN for codec in self.codecs), self._split.length
        return (Span(length, False, not plain),) if length else ()

    def _newest(self, count: int) -> Tensor:
        positions = self._split.newest_last()[POSITION]
        return positions[:, :, max(0, positions.shape[2] - count) :]

    def add(self, k: Tensor, v: Tensor, own: Planes) -> None:
        self.append(self.codecs.encode(k, v) | dict(own))

    def append(self, planes: Planes) -> None:
        """Append encoded tokens to all parts."""
        self._split.append(planes)

    def step_parts(self) -> tuple[StepPart, ...]:
        return tuple(
            StepPart(self.codecs, part.storage, (), row, part.head, place)
            for part in self._split.parts
            for place, row in enumerate(
                range(self._split.batch) if part.rows is None else part.rows.tolist()
            )
        )

    def step_state(self) -> tuple[object, ...]:
        return self._split.storages

    def evictable(self) -> Planes:
        """The planes of all parts, padded to one length; a copy."""
        return self._split.read()

    def write_plane(self, name: str, plane: Tensor) -> None:
        """Write plane `name` of all slots."""
        self._split.write_plane(name, plane)

    keep = write_plane

    def surplus(self, budget: int) -> int:
        return self._split.surplus(budget)

    def evict(self, victims: Tensor) -> None:
        if victims.dtype != torch.bool:
            victims = marked(victims, self._split.length)
        self._split.drop(victims)

    def free(self, gone: Tensor) -> None:
        if not self.length:
            return
        position = self._split.read()[POSITION]
        at = position.clamp(min=0).to(torch.int64)
        self._split.drop(gone.to(at.device).gather(2, at) | (position < 0))

    def free_hidden(self) -> bool:
        self._split.drop(self._split.read()[POSITION] < 0)
        self.hidden = 0
        return False

    def mark(self, fewer: int = 0) -> tuple[int, ...]:
        return tuple(storage.length - fewer for storage in self._split.storages)

    def cut(self, mark: tuple[int, ...]) -> None:
        if not mark:
            self._split.reset()
        for storage, length in zip(self._split.storages, mark, strict=False):
            storage.truncate(min(storage.length, length))

    def pack(self) -> LayerSlots | None:
        """As `LayerSlots.pack`. Slots of differentiable storage must not move, because gradients
        need their order."""
        split = self._split
        if split.differentiable or not split.length or not split.loose:
            return None
        found = parted(split.read(), self._blank, by_head=split.by_head)
        return None if found is None else self._holding(found)

    def take_rows(self, index: Tensor) -> LayerSlots:
        self._split.rows(index)
        return self._holding(self._split)

    def _holding(self, split: Split) -> LayerSlots:
        """Take `split` as the new parts; return the object that now holds the slots."""
        self._split = split
        return self

    def fork(self) -> Self:
        other = copy(self)
        other._blank = deepcopy(self._blank)
        other._split = self._split.copied_to(other._blank)
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
        if storage.limited:
            raise SpecError(
                f"heads of different lengths need storage that grows, but {storage.name} does not; "
                "use @growing"
            )
        super().__init__(codecs, Split(storage, by_head=True), storage.empty_copy())

    @property
    def storages(self) -> tuple[Storage, ...]:
        """The storages of all heads; several for each head if rows differ in length too."""
        return self._split.storages

    def reset(self) -> ByHead:
        self._split.reset()
        self.hidden = 0
        return self

    def parts(self) -> dict[str, Planes]:
        return {f"head.{i}": self._split.resting_head(i) for i in self._split.heads}

    def load(self, parts: Mapping[str, Planes], rows: int) -> ByHead:
        self.reset()
        self._split.load([on_one_device(parts[f"head.{i}"]) for i in range(len(parts))])
        return self

    def adopt_frozen(self, runs: Sequence[Run], history: History) -> None:
        dtype = None if history.geometry is None else history.geometry.dtype
        self.reset()
        for planes in FrozenRuns(runs, dtype).placed(self.codecs.key):
            rows = {n: planes[n].expand(history.rows, *planes[n].shape[1:]) for n in planes}
            self._split.append(rows)


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

    def reset(self) -> LayerSlots:
        return self._undivided(self._blank.empty_copy(), 0)

    def parts(self) -> dict[str, Planes]:
        return {"slots": self._split.resting()}

    def load(self, parts: Mapping[str, Planes], rows: int) -> LayerSlots:
        return self.reset().load(parts, rows)


def of_heads(planes: Planes, heads: int) -> dict[str, Planes]:
    """Slots of all heads as the parts of `ByHead`."""
    return {f"head.{i}": narrowed(planes, None, i) for i in range(heads)}
