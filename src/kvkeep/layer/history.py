"""History: the record of the tokens fed to a layer, apart from its slots."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, field
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvkeep.geometry import Geometry
from kvkeep.planes import HOLE, Planes, slot_count

OF_ROWS = ("pads", "holes", "kinds", "offset", "centre")
"""Fields of `History` that have an element for each row, on the device of the slots."""

MEMORY = "memory"
"""The part of `LayerState.tensors` with `History.memory`."""

_new = object.__new__


@dataclass(slots=True, eq=False, repr=False)
class History:
    """The record of the tokens fed to a layer: number of columns, padding per row, geometry, and
    the policy's state per row."""

    columns: int = 0
    pads: Tensor | None = None
    """(B,) padding columns per row; None: no padding so far."""
    holes: Tensor | None = None
    """(B,) holes per row: columns without a token that count in positions; None: no hole so far."""
    kinds: Tensor | None = None
    """int8 (B, n), kinds of the first n columns: 0 a token, -1 padding, `HOLE`. Decode steps do not
    extend it: later columns are tokens. None: all columns are tokens."""
    floor: int = 0
    """The fewest columns to which a crop can return."""
    joined: bool = False
    """Whether the slots join texts computed without each other."""
    embedded: bool = False
    """Whether token ids do not identify the whole input: images, sound, given keys, ..."""
    offset: Tensor | None = None
    """(B,) the model's next rotary position minus `seen`; negative after most images, whose tokens
    share positions. None: 0."""
    tokens: Tensor | None = None
    """(B, n) token ids of the first n columns, as far as they are known; None: unknown."""
    centre: Tensor | None = None
    """(B, H, 2, Dk) float32, the numbers of a `Centre` that all keys lack; None: keys are whole."""
    geometry: Geometry | None = None
    """None before the first token."""
    memory: dict[str, Tensor] = field(default_factory=dict)
    """The policy's state for each row, (B, ...)."""

    def next_positions(
        self,
        n: int,
        device: torch.device,
        real: Tensor | None = None,
        holes_after: int | None = None,
    ) -> Tensor:
        """Positions of the next n columns: int32 (n,) if no row has had padding and `real` is None,
        else (B, n). Where `real`, bool (B, n), is False, the column is padding: position -1.

        Args:
            holes_after: padding after a row's first token counts (position `HOLE`), except among
                the first `holes_after` columns. None: padding never counts.
        """
        if real is None:
            stop = self.columns + n
            following = torch.arange(self.columns, stop, dtype=torch.int32, device=device)
            pads = self.pads
            return following if pads is None else following - pads.to(device, torch.int32)[:, None]
        seen = self.columns if self.pads is None else self.columns - self.pads.to(device)[:, None]
        if holes_after is None:
            following = seen + real.cumsum(dim=1) - 1
            return following.masked_fill(~real, -1).to(torch.int32)
        begun = real.cumsum(dim=1) + (seen > holes_after) > 0
        empty = torch.where(begun, HOLE, -1)
        return torch.where(real, seen + begun.cumsum(dim=1) - 1, empty).to(torch.int32)

    def feed(
        self, position: Tensor, rows: int, *, shows_padding: bool, holes: bool = False
    ) -> tuple[History, Tensor]:
        """The history after a chunk, and the positions of the chunk's queries.

        Args:
            position: positions of the chunk's tokens, (n,) or (B, n) with -1 for padding.
            rows: B.
            shows_padding: give a padding query the position of the last token before it in its row,
                so that it sees the same slots as that token; False: -1, so that it sees nothing.
            holes: whether some positions may be `HOLE`.
        """
        after, own = copy(self), position
        if position.dim() == 2 or self.pads is not None:
            position = position.expand(rows, -1)
            before = self.pads if self.pads is not None else position.new_zeros(rows)
            after.pads = before + (position < 0).sum(dim=1)
            if holes:
                more = (position == HOLE).sum(dim=1)
                after.pads = after.pads - more
                after.holes = more if self.holes is None else more + self.holes
            if position.shape[1] > 1:
                after.kinds = torch.cat([self._kinds(rows, position.device), _kinds(position)], 1)
            last = self.columns - 1 - before[:, None]
            position = torch.maximum(position.cummax(dim=1).values, last)
        after.columns += position.shape[-1]
        return after, position if shows_padding else own.expand_as(position)

    def with_column(self, *, floor: int | None = None) -> History:
        """The history after one more column without padding; `floor` None: keep the floor."""
        after = _new(History)  # for each decode step: `copy` takes several times as long
        after.columns, after.geometry = self.columns + 1, self.geometry
        after.floor = self.floor if floor is None else floor
        after.pads, after.holes, after.kinds = self.pads, self.holes, self.kinds
        after.joined, after.centre = self.joined, self.centre
        after.embedded, after.offset, after.tokens = self.embedded, self.offset, self.tokens
        after.memory = self.memory
        return after

    def without(self, newest: Tensor) -> History:
        """The history before the newest n columns; `newest` (B, n): their positions."""
        before = copy(self)
        before.columns -= newest.shape[1]
        if self.pads is not None:
            before.pads = self.pads - (newest < 0).sum(dim=1)
        if self.holes is not None:
            fewer = (newest == HOLE).sum(dim=1)
            before.pads, before.holes = cast(Tensor, before.pads) + fewer, self.holes - fewer
        if self.kinds is not None:
            before.kinds = self.kinds[:, : before.columns]
        if self.tokens is not None:
            before.tokens = self.tokens[:, : before.columns]
        return before

    def mark_embedded(self, offset: Tensor | None = None, floor: int = 0) -> None:
        """Record that token ids do not identify the whole input: some tokens are images or sound,
        or were given as embeddings.

        Args:
            offset: the model's next rotary position minus `seen`, int64 (B,); None: 0.
            floor: the fewest columns that a crop may leave: with fewer, `offset` would be wrong.
        """
        self.embedded, self.offset = True, offset
        self.floor = max(self.floor, floor)

    def take_rows(self, index: Tensor) -> None:
        """Row i becomes a copy of row index[i]."""
        for name in (*OF_ROWS, "tokens"):
            held: Tensor | None = getattr(self, name)
            if held is not None:
                setattr(self, name, held.index_select(0, index.to(held.device)))
        if self.geometry is not None:
            self.geometry = self.geometry._replace(rows=len(index))
        self.memory = {name: x.index_select(0, index) for name, x in self.memory.items()}

    def fork(self) -> History:
        """An independent copy."""
        other = copy(self)
        other.memory = {name: x.clone() for name, x in self.memory.items()}
        return other

    @property
    def newest(self) -> int | Tensor:
        """The newest position: one number for all rows, or (B, 1, 1) where rows differ."""
        last = self.columns - 1
        return last if self.pads is None else last - self.pads[:, None, None]

    @property
    def rows(self) -> int:
        """B; 0 before the first token."""
        return 0 if self.geometry is None else self.geometry.rows

    @property
    def seen(self) -> Tensor:
        """Tokens fed so far, int64 (B,), without padding."""
        fed = torch.full((self.rows,), self.columns, dtype=torch.int64)
        for empty in (self.pads, self.holes):
            fed = fed if empty is None else fed - empty.cpu()
        return fed

    def columns_as(self) -> Tensor | None:
        """The kind of each column, int8 (B, columns), as in `kinds`; None: unknown."""
        if self.geometry is None:
            return None
        kinds = self._kinds(self.rows, self.geometry.device)
        for kind, count in ((-1, self.pads), (HOLE, self.holes)):
            expected = 0 if count is None else count.to(kinds.device)
            if bool(((kinds == kind).sum(dim=1) != expected).any()):
                return None
        return kinds

    def hide(self, kinds: Tensor) -> None:
        """Turn some tokens into holes. `kinds`: int8 (B, columns)."""
        self.kinds, self.holes = kinds, (kinds == HOLE).sum(dim=1)
        self.pads = (kinds == -1).sum(dim=1)

    def _kinds(self, rows: int, device: torch.device) -> Tensor:
        """`kinds`, extended with tokens to the number of columns."""
        known = self.kinds
        if known is None:
            return torch.zeros(rows, self.columns, dtype=torch.int8, device=device)
        return pad(known, (0, self.columns - known.shape[1]))


def _kinds(position: Tensor) -> Tensor:
    return position.clamp(max=0).to(torch.int8)


class Prompt(NamedTuple):
    """The leading columns of a text, which are no drafts: a crop never removes them. They are fed
    in chunks of `chunk` columns; None: in one chunk."""

    columns: int = 0
    chunk: int | None = None


def by_part(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """The inverse of `LayerState.tensors`: tensors by part, and by name."""
    parts: dict[str, dict[str, Tensor]] = {}
    for name, x in tensors.items():
        part, _, own = name.rpartition(".")
        parts.setdefault(part, {})[own] = x
    return parts


class LayerState(NamedTuple):
    """A layer's history and slots. `parts` maps a part's name, such as `slots`, to its planes."""

    history: History
    parts: Mapping[str, Planes]

    @property
    def length(self) -> int:
        """Number of slots, without a tail or a chunk set aside; 0 for heads in parts."""
        return slot_count(self.parts.get("slots", {}))

    def tensors(self) -> dict[str, Tensor]:
        """All planes, by `part.plane`, and the policy's state, by `memory.name`."""
        parts = {**self.parts, MEMORY: self.history.memory} if self.history.memory else self.parts
        return {f"{part}.{name}": own[name] for part, own in parts.items() for name in own}

    def copy(self) -> LayerState:
        """A copy that shares no tensor."""
        return LayerState(self.history.fork(), self._each(torch.clone))

    def to(self, device: torch.device) -> LayerState:
        """The same state on a device; tensors already on it are not copied."""
        history = self.history.fork()
        for name in OF_ROWS:
            held = getattr(history, name)
            setattr(history, name, None if held is None else held.to(device))
        history.memory = {name: x.to(device) for name, x in history.memory.items()}
        if history.geometry is not None:
            history.geometry = history.geometry._replace(device=device)
        return LayerState(history, self._each(lambda x: x.to(device)))

    def _each(self, change: Callable[[Tensor], Tensor]) -> Mapping[str, Planes]:
        return {
            part: {name: change(planes[name]) for name in planes}
            for part, planes in self.parts.items()
        }
