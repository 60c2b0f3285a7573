"""Cursor: what a layer holds, how far it has come, and how a change that failed is undone."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from enum import Enum, auto
from typing import NamedTuple

import torch
from torch import Tensor

from kvkeep.errors import StateError
from kvkeep.layer.history import History, Prompt
from kvkeep.layer.slots import LayerSlots
from kvkeep.layer.turn import Turn
from kvkeep.planes import POSITION
from kvkeep.policy import Observation


class State(Enum):
    """What is being done to a layer, or was when it was interrupted."""

    IDLE = auto()
    WRITING = auto()
    """Tokens are being written: cutting the slots to `Cursor.start` undoes it."""
    MOVING = auto()
    """Slots are being moved or emptied: after an interrupt their contents are unknown."""


class Before(NamedTuple):
    """A layer's state before a token, as far as later steps change it in place. `planes` are copies
    of the positions and the policy's planes; `mark` and `hidden` are those of the slots."""

    history: History
    mark: tuple[int, ...]
    hidden: int
    planes: Mapping[str, Tensor]


class Cursor:
    """The changing part of a layer. Everything that a step, or another change, moves is here.

    Attributes:
        slots: what holds the slots.
        history: what was fed.
        chunk: positions of the last chunk's tokens.
        state: see `State`.
        start: the history and the slots' mark before the last chunk.
        turn: held by the thread that changes the layer.
        journal: the states before the tokens that can be taken back, the oldest first.
        record_past: whether the chunks fed may be drafts, of which a crop takes some back.
        prompt: the columns that are certain although `record_past` is set.
        holes_after: an integer if padding behind a row's first token counts in positions, as it
            does in transformers' sliding windows: that among the first `holes_after` tokens does
            not. None: no padding counts.
        evicted: what `positions_of` gave for each eviction; None: it is not recorded.
        unread: how many layers are still to attend to the last chunk's slots; see `ReadAgain`.
        observed: what the policy observes after these readings.
        queries: positions of the last chunk's queries, and until which they see; None: of one
            token.
    """

    def __init__(self, slots: LayerSlots) -> None:
        self.slots, self.history, self.turn = slots, History(), Turn()
        self.chunk: Tensor | None = None
        self.state = State.IDLE
        self.start: tuple[History, tuple[int, ...]] | None = None
        self.journal: list[Before] = []
        self.record_past, self.prompt = False, Prompt()
        self.holes_after: int | None = None
        self.evicted: list[Tensor] | None = None
        self.unread = 0
        self.observed: Observation | None = None
        self.queries: tuple[Tensor, Tensor | None] | None = None

    def fork(self) -> Cursor:
        """The same state, which shares the frozen slots and copies the others."""
        other = copy(self)
        other.slots, other.history = self.slots.fork(), self.history.fork()
        other.evicted, other.turn, other.journal = None, Turn(), [*self.journal]
        return other

    @property
    def tentative(self) -> bool:
        """Whether the newest tokens may be taken back."""
        return self.record_past and self.history.columns > self.prompt.columns

    # -- one change -------------------------------------------------------------------------

    def begin(self) -> None:
        """Record the state before tokens are written."""
        self.start, self.state = (self.history, self.slots.mark()), State.WRITING

    def take_back(self) -> None:
        """Return to `start`, if no eviction has followed it. An interrupted call can be
        repeated."""
        assert self.start is not None
        self.state = State.WRITING
        self.forget_readings()
        history, mark = self.start
        self.slots.cut(mark)
        self.history = history
        if not history.columns:
            self.reset()
        self.state = State.IDLE

    @contextmanager
    def moved(self) -> Iterator[None]:
        """Move slots. If the body is interrupted, or fails after it has changed slots, the state
        stays `MOVING`: the contents of the slots are unknown."""
        mark = self.slots.mark()
        before = State.WRITING if self.state is State.WRITING else State.IDLE
        self.state = State.MOVING
        try:
            yield
        except Exception:
            # Storages evict all victims or none: with equal lengths, nothing has changed.
            if not self.slots.torn and self.slots.mark() == mark:
                self.state = before
            raise
        self.state = before

    def pack(self) -> bool:
        """Move rows of very different lengths to storages of their own; whether that was done."""
        packed = self.slots.pack()
        self.slots = packed or self.slots
        return packed is not None

    def mend(self) -> None:
        """See `LayerCache.mend`."""
        if self.state is State.MOVING:
            raise StateError(
                "an eviction, another change of all slots, or a chunk after some of its steps was "
                "interrupted or failed, so the contents of the slots are unknown; reset() the "
                "cache and feed the tokens again, or restore a snapshot"
            )
        if self.state is State.WRITING:
            self.take_back()
        history, length = self.history, self.slots.length
        if not history.floor and not history.joined and length != history.columns:
            raise StateError(
                f"the layer holds {length} slots, but {history.columns} tokens were fed and "
                "none were evicted; something else changed its slots: reset() the cache and feed "
                "the tokens again"
            )

    def reset(self) -> None:
        """Remove all tokens."""
        self.state = State.MOVING
        self.forget_readings()
        self.slots = self.slots.reset()
        self.history, self.chunk, self.start, self.journal = History(), None, None, []
        self.holes_after = None if self.holes_after is None else 0
        self.state = State.IDLE

    def require_read(self) -> None:
        """Raise StateError if readings of the last step are to come."""
        if self.unread:
            raise StateError(
                f"{self.unread} of the layers that share this layer's keys and values have not "
                "attended to its last tokens: a forward was interrupted; rewind() or reset() the "
                "cache"
            )

    def forget_readings(self) -> bool:
        """Expect no readings any more; whether some were expected."""
        expected, self.unread, self.observed = self.unread > 0, 0, None
        return expected

    # -- tokens that can be taken back ------------------------------------------------------

    @property
    def entries(self) -> int:
        """How many entries the journal has; those of steps that were taken back do not count."""
        fed = self.history.columns
        return sum(before.history.columns < fed for before in self.journal)

    def note(self, names: Collection[str]) -> None:
        """Add the present state to the journal.

        Args:
            names: of the policy's planes.
        """
        del self.journal[self.entries :]
        held: dict[str, Tensor] = {}
        if self.history.columns:
            planes = self.slots.evictable()
            held = {name: planes[name].clone() for name in (*names, POSITION)}
        history = _copied(self.history)
        self.journal.append(Before(history, self.slots.mark(), self.slots.hidden, held))

    def put_back(self, index: int) -> None:
        """Return to the state in an entry of the journal."""
        before = self.journal[index]
        self.state = State.MOVING
        self.forget_readings()
        self.slots.cut(before.mark)
        changed = dict(before.planes)
        if not self.slots.hidden:  # no position has changed, and frozen ones cannot be written
            changed.pop(POSITION, None)
        planes = self.slots.evictable()
        with torch.inference_mode():  # allows in-place changes of planes made in any mode
            for name, plane in changed.items():
                planes[name].copy_(plane)
                self.slots.keep(name, planes[name])
        self.slots.hidden = before.hidden
        self.history = _copied(before.history)
        del self.journal[index:]
        if not self.history.columns:
            self.reset()
        self.state = State.IDLE

    def return_to(self, columns: int) -> None:
        """Return to the state after `columns` columns, since which nothing was evicted but what the
        journal can restore."""
        # The tokens before an entry, back to the previous one, were fed without a decision.
        for index, before in enumerate(self.journal):
            if before.history.columns >= columns:
                self.put_back(index)
                break
        fewer = self.history.columns - columns
        if fewer:
            left = self.history.without(self.slots.newest_positions(fewer))
            self.start = left, self.slots.mark(fewer)
            self.take_back()


def _copied(history: History) -> History:
    """A copy that later steps do not change: they replace the tensors in `memory`."""
    other = copy(history)
    other.memory = dict(history.memory)
    return other
