"""The states of recurrent and convolutional layers, which a cache holds beside keys and values."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from kvkeep.errors import RollbackError, StateError
from kvkeep.features import Feature, Lacks, unsupported


class StateSpec(NamedTuple):
    """A state's shape without the batch axis, its dtype and its device."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def nbytes(self) -> int:
        """Bytes of one row."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def why_not(self, x: Tensor, rows: int) -> str:
        """Why tensor x is not a state of `rows` rows; empty if it is."""
        if tuple(x.shape) == (rows, *self.shape) and x.dtype == self.dtype:
            return ""
        return f"is {tuple(x.shape)} {x.dtype}, not {(rows, *self.shape)} {self.dtype}"


_HAS = "has recurrent layers"

LACKS: Lacks = {
    **unsupported(_HAS, Feature.GRAPHED, Feature.NARROWED, Feature.HOLES),
    Feature.REREAD: f"{_HAS}, which cannot start in the middle of a text",
    Feature.JOINED: f"{_HAS}, whose states after two texts cannot be merged",
    Feature.PLACED: f"{_HAS}, which compute tokens in their order, not at given positions",
    Feature.PAIRS: f"{_HAS}, whose states cannot be computed from keys and values",
    Feature.UNTRIED: f"{_HAS}, whose states may be held outside the cache",
}
"""Features that models with recurrent layers lack."""


class RecurrentStates(ABC):
    """The states of all recurrent or convolutional layers of a model: state-space models, linear
    attention, short convolutions.

    A state consists of tensors whose size does not depend on the number of tokens fed. It cannot be
    truncated: it returns only to marked points, where it was copied.

    Attributes:
        lacks: the features that a model with these states lacks.
        places: the indices of the layers with states among the model's layers, if known.
    """

    lacks: ClassVar[Lacks] = LACKS
    places: frozenset[int] = frozenset()

    def __init__(self) -> None:
        self.columns: int | None = 0
        """Columns fed; None (unknown) from a forward's first change of a state until its end."""
        self.running = False  # whether a forward has begun and not ended
        self.row_of: tuple[object, int] | None = None
        """The `Rows` of several sequences whose tensors these states view, and the index of their
        row; None: these states have their own tensors. See `kvkeep.layer.packed_states`."""
        self._marks: dict[int, dict[str, Tensor]] = {}

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """The tensors by name, (B, ...) each, as views; empty before the first token."""

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace the contents by `tensors`, without a copy; empty: forget all tokens."""
        self.row_of = None
        self.hold(tensors)

    @abstractmethod
    def hold(self, tensors: Mapping[str, Tensor]) -> None:
        """Make `tensors` the contents; called by `load`."""

    @abstractmethod
    def empty(self) -> Self:
        """States of the same layers, before the first token."""

    @property
    def specs(self) -> dict[str, StateSpec]:
        """The spec of each tensor; empty before the first token."""
        return {
            name: StateSpec(tuple(x.shape[1:]), x.dtype, x.device)
            for name, x in self.tensors().items()
        }

    # -- a forward --------------------------------------------------------------------------

    def begin(self, columns: int) -> None:
        """Start a forward on a cache of `columns` columns.

        Raises:
            StateError: a forward was interrupted, so the states are unknown.
        """
        self.require(columns)
        if not torch.is_inference_mode_enabled():  # inference tensors cannot be changed in place
            held = self.tensors()
            if any(x.is_inference() for x in held.values()):
                self.load({name: x.clone() for name, x in held.items()})
        self.running = True

    def change(self) -> None:
        """Note that a layer of the running forward is about to change its state."""
        self.columns = None

    def end(self, columns: int) -> None:
        """End a forward, after which the cache holds `columns` columns."""
        self.columns, self.running = columns, False

    def require(self, columns: int) -> None:
        """Raise StateError unless the states are valid after exactly `columns` columns."""
        if self.columns != columns:
            raise StateError(
                "a forward was interrupted while it changed the states of recurrent layers, so "
                "they are unknown; rewind() to a mark, restore a snapshot, or reset() the cache "
                "and feed the tokens again"
                if self.columns is None
                else f"the recurrent layers were fed {self.columns} tokens, but the attention "
                f"layers {columns}; reset() the cache and feed the tokens again"
            )

    def in_place(self) -> dict[str, Tensor]:
        """The tensors by name, for a program that changes them in place: contiguous, and not
        inference tensors."""
        held = self.tensors()
        if any(x.is_inference() or not x.is_contiguous() for x in held.values()):
            dense = torch.contiguous_format
            with torch.inference_mode(False), torch.no_grad():
                self.load({name: x.clone(memory_format=dense) for name, x in held.items()})
        return self.tensors()

    # -- marks ------------------------------------------------------------------------------

    def mark(self) -> None:
        """Copy the states, so that `back_to` can return to this point.

        Raises:
            StateError: a forward is running or was interrupted.
        """
        if self.columns is None:
            self.require(0)
        elif self.columns not in self._marks:
            self._marks[self.columns] = {name: x.clone() for name, x in self.tensors().items()}

    @property
    def marks(self) -> Mapping[int, Mapping[str, Tensor]]:
        """The copies made by `mark`, by number of columns fed."""
        return self._marks

    def unmark(self, columns: Iterable[int] | None = None) -> None:
        """Drop the marks at these numbers of columns; None: all marks."""
        gone = set(self._marks if columns is None else columns)
        self._marks = {at: kept for at, kept in self._marks.items() if at not in gone}

    def returns_to(self, columns: int) -> bool:
        """Whether the states can return to the point after `columns` columns."""
        return columns in (0, self.columns) or columns in self._marks

    def require_mark(self, columns: int) -> None:
        """Raise RollbackError if the states cannot return to the point after `columns` columns."""
        if self.returns_to(columns):
            return
        known = ", ".join(map(str, sorted(self._marks)))
        copied = f"copied only after {known}" if known else "never copied"
        raise RollbackError(
            f"recurrent layers cannot return to the point after {columns} tokens, because their "
            f"states were {copied}; call cache.mark() at that point, or reset() and feed "
            "the tokens again"
        )

    def back_to(self, columns: int) -> None:
        """Return to a marked point, or to the start. Drop later marks.

        Raises:
            RollbackError: the point is not marked.
        """
        self.require_mark(columns)
        if columns != self.columns:
            kept = self._marks.get(columns, {})
            self.load({name: x.clone() for name, x in kept.items()})
            self.end(columns)
        self._marks = {at: kept for at, kept in self._marks.items() if at <= columns}

    # -- whole-state changes ----------------------------------------------------------------

    def reset(self) -> None:
        """Forget all tokens and marks."""
        self.load({})
        self.end(0)
        self._marks = {}

    def take_rows(self, index: Tensor) -> None:
        """Row i becomes a copy of row index[i], int64 (B',), in the marks too."""
        self.load(_rows(self.tensors(), index))
        self._marks = {at: _rows(kept, index) for at, kept in self._marks.items()}

    def fork(self) -> Self:
        """An independent copy. Marks are shared, because they are never changed."""
        other = self.empty()
        if self.columns != 0:
            other.load({name: x.clone() for name, x in self.tensors().items()})
        other.columns, other._marks = self.columns, dict(self._marks)
        return other

    def __getstate__(self) -> dict[str, Any]:
        if self.row_of is not None:  # pickling or copying a view would include the other rows
            self.load({name: x.clone() for name, x in self.tensors().items()})
        return self.__dict__

    def restore(self, tensors: Mapping[str, Tensor], columns: int) -> None:
        """Replace the contents by a copy of the states after `columns` columns, and drop all
        marks."""
        self.load({name: x.clone() for name, x in tensors.items()})
        self.end(columns)
        self._marks = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the states, marks not counted."""
        return sum(x.nbytes for x in self.tensors().values())

    @property
    def marked_bytes(self) -> int:
        """Bytes of the copies at marks."""
        return sum(x.nbytes for kept in self._marks.values() for x in kept.values())


class NoStates(RecurrentStates):
    """The states of a model without recurrent layers: there are none."""

    lacks: ClassVar[Lacks] = {}

    def __bool__(self) -> bool:
        return False

    def tensors(self) -> dict[str, Tensor]:
        return {}

    def hold(self, tensors: Mapping[str, Tensor]) -> None:
        return None

    def empty(self) -> Self:
        return type(self)()

    def require(self, columns: int) -> None:
        return None

    def mark(self) -> None:
        return None

    def returns_to(self, columns: int) -> bool:
        return True


def _rows(tensors: Mapping[str, Tensor], index: Tensor) -> dict[str, Tensor]:
    with torch.inference_mode(False), torch.no_grad():
        return {name: x.index_select(0, index.to(x.device)) for name, x in tensors.items()}
