"""Cursor: a layer's changing state, and how a failed change is undone."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from enum import Enum, auto
from threading import RLock
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvkeep.errors import StateError
from kvkeep.layer.frozen import Run
from kvkeep.layer.history import History, LayerState, Prompt
from kvkeep.layer.slots import LayerSlots
from kvkeep.planes import POSITION, Planes
from kvkeep.policy import Observation


class State(Enum):
    """The change that is running, or that was interrupted."""

    IDLE = auto()
    WRITING = auto()
    """Tokens are being written: cutting the slots to `Cursor.start` undoes it."""
    MOVING = auto()
    """Slots are being moved or emptied: after an interrupt their contents are unknown."""


class Before(NamedTuple):
    """The changing part of a layer's state before a token. `planes`: copies of the positions and
    the policy's planes; `mark` and `hides`: the slots' `mark()` and `hides`."""

    history: History
    mark: tuple[int, ...]
    hides: tuple[int, ...]
    planes: Mapping[str, Tensor]


class Cursor:
    """The changing part of a layer: everything that a step or another change moves.

    Attributes:
        slots: the layer's slots.
        history: the record of the tokens fed.
        chunk: positions of the last chunk's tokens.
        state: the change in progress; see `State`.
        start: the history and the slots' mark before the last chunk.
        turn: lock held by the thread that changes the layer.
        journal: the states before each draft token, the oldest first.
        record_past: True while chunks may be drafts, which a crop can remove.
        prompt: the leading columns that are certain even while `record_past` is set.
        holes_after: padding after a row's first token counts in positions, as in transformers'
            sliding windows, except among the first `holes_after` tokens. None: padding never
            counts.
        evicted: the result of `positions_of` for each eviction; None: evictions are not recorded.
        readers: number of layers that attend to the slots after each step; see `Writer.read`.
        unread: number of readers that have yet to attend to the last chunk's slots.
        observed: the observation that the policy gets after these layers have attended.
        queries: positions of the last chunk's queries, and the newest position that each sees;
            None: the chunk was one token.
    """

    def __init__(self, slots: LayerSlots, readers: int = 0) -> None:
        self.slots, self.history, self.turn = slots, History(), Turn()
        self.chunk: Tensor | None = None
        self.state = State.IDLE
        self.start: tuple[History, tuple[int, ...]] | None = None
        self.journal: list[Before] = []
        self.record_past, self.prompt = False, Prompt()
        self.holes_after: int | None = None
        self.evicted: list[Tensor] | None = None
        self.readers, self.unread = readers, 0
        self.observed: Observation | None = None
        self.queries: tuple[Tensor, Tensor | None] | None = None

    def fork(self) -> Cursor:
        """A copy of the cursor that shares the frozen slots."""
        other = copy(self)
        other.slots, other.history = self.slots.fork(), self.history.fork()
        other.evicted, other.turn, other.journal = None, Turn(), [*self.journal]
        return other

    @property
    def tentative(self) -> bool:
        """Whether the newest tokens are drafts, which a crop may remove."""
        return self.record_past and self.history.columns > self.prompt.columns

    # -- one change -------------------------------------------------------------------------

    def begin(self) -> None:
        """Record the state before tokens are written."""
        self.start, self.state = (self.history, self.slots.mark()), State.WRITING

    def take_back(self) -> None:
        """Return to `start`. Nothing may have been evicted since. Can be called again after an
        interrupt."""
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
        """A context for a change that moves slots. If its body is interrupted, or fails after
        changing slots, the state stays `MOVING`: the contents of the slots are unknown."""
        mark = self.slots.mark()
        before = State.WRITING if self.state is State.WRITING else State.IDLE
        self.state = State.MOVING
        try:
            yield
        except Exception:
            # Storages evict all victims or none: with equal lengths, nothing has changed.
            torn = self.slots.torn or self.slots.storage.torn
            if not torn and self.slots.mark() == mark:
                self.state = before
            raise
        self.state = before

    def pack(self) -> bool:
        """Move rows of very different lengths to separate storages; return whether any moved."""
        packed = self.slots.pack()
        self.slots = packed or self.slots
        return packed is not None

    def mend(self) -> None:
        """Remove the tokens of an interrupted step, if there was one.

        Raises:
            StateError: the step was interrupted while it moved slots, so their contents are
                unknown; or nothing was evicted, but the number of slots differs from the number of
                columns fed.
        """
        with self.turn:
            if self.state is State.MOVING:
                raise StateError(
                    "an eviction, another change of all slots, or a chunk after its first step was "
                    "interrupted or failed, so the contents of the slots are unknown; reset() the "
                    "cache and feed the tokens again, or restore a snapshot"
                )
            if self.state is State.WRITING:
                self.take_back()
            history, length = self.history, self.slots.length
            if not history.floor and not history.joined and length != history.columns:
                raise StateError(
                    f"the layer holds {length} slots, but {history.columns} tokens were fed and "
                    "none were evicted; other code changed its slots: reset() the cache and feed "
                    "the tokens again"
                )

    def reset(self) -> None:
        """Remove all tokens."""
        self.state = State.MOVING
        self.forget_readings()
        self.slots = self.slots.load({}, 0)
        self.history, self.chunk, self.start, self.journal = History(), None, None, []
        self.holes_after = None if self.holes_after is None else 0
        self.state = State.IDLE

    def require_read(self) -> None:
        """Raise StateError if some layers have yet to read the last step's slots."""
        if self.unread:
            raise StateError(
                f"{self.unread} of the layers that share this layer's keys and values have not "
                "attended to its last tokens: a forward was interrupted; rewind() or reset() the "
                "cache"
            )

    def await_readings(self, observation: Observation | None = None) -> None:
        """Record at the end of a step that readings follow."""
        self.unread, self.observed = self.readers, observation

    def forget_readings(self) -> bool:
        """Stop expecting readings of the last step; return whether any were expected."""
        expected, self.unread, self.observed = self.unread > 0, 0, None
        return expected

    # -- whole-state changes ----------------------------------------------------------------

    def take_rows(self, index: Tensor) -> None:
        """See `LayerCache.take_rows`. All drafts are certain."""
        geometry = self.history.geometry
        if geometry is None:
            return
        index = index.to(geometry.device)
        with self.turn, self.moved():
            self.slots = self.slots.take_rows(index)
            if self.chunk is not None and self.chunk.dim() == 2:
                self.chunk = self.chunk.index_select(0, index)
            self.history.take_rows(index)

    def restore(self, state: LayerState, *, packs: bool) -> None:
        """Replace the contents by a copy of `state`. `packs`: empty slots may be freed."""
        with self.turn:
            self.reset()
            self.state = State.MOVING
            self.slots = self.slots.load(state.parts, state.history.rows)
            self.history = history = state.history.fork()
            if packs and history.pads is not None and history.floor and self.pack():
                fresh = history.columns - history.floor
                newest = self.slots.positions(newest_last=True)[:, :, -fresh:]
                if fresh and (newest.shape[2] < fresh or bool((newest < 0).any())):
                    history.floor = history.columns
            self.state = State.IDLE

    def adopt_frozen(self, history: History, runs: Sequence[Run]) -> None:
        """Replace the contents by frozen slots, which other caches may share. New tokens go to a
        storage after them."""
        with self.turn, self.moved():
            self.slots.adopt_frozen(runs, history)
            self.history, self.journal = history, []

    def adopt_planes(
        self, history: History, planes: Planes, length: int, empty: Tensor | None = None
    ) -> None:
        """Use `planes`, (B, H|1, limit, ...), as fixed storage, with the first `length` slots in
        use. Free the slots at the indices `empty`, int64 (B, H, E)."""
        with self.turn, self.moved():
            self.slots.adopt_planes(planes, length, history.rows)
            self.history, self.journal = history, []
            self.forget_readings()
            if empty is not None:
                self.slots.storage.evict(empty)

    # -- drafts -----------------------------------------------------------------------------

    @property
    def entries(self) -> int:
        """Number of journal entries, not counting those of undone steps."""
        fed = self.history.columns
        return sum(before.history.columns < fed for before in self.journal)

    def note(self, names: Collection[str]) -> None:
        """Add the current state to the journal.

        Args:
            names: the policy's planes.
        """
        del self.journal[self.entries :]
        held: dict[str, Tensor] = {}
        if self.history.columns:
            planes = self.slots.observed().planes
            held = {name: planes[name].clone() for name in (*names, POSITION)}
        history = _copied(self.history)
        self.journal.append(Before(history, self.slots.mark(), self.slots.hides, held))

    def put_back(self, index: int) -> None:
        """Return to the state of journal entry `index`."""
        before = self.journal[index]
        self.state = State.MOVING
        self.forget_readings()
        self.slots.cut(before.mark)
        changed = dict(before.planes)
        if not self.slots.hidden:  # no position has changed, and frozen planes cannot be written
            changed.pop(POSITION, None)
        observed = self.slots.observed()
        planes = observed.planes
        with torch.inference_mode():  # allows in-place changes of planes made in any mode
            for name, plane in changed.items():
                planes[name].copy_(plane)
                observed.write(name, planes[name])
        self.slots.hides = before.hides
        self.history = _copied(before.history)
        del self.journal[index:]
        if not self.history.columns:
            self.reset()
        self.state = State.IDLE

    def return_to(self, columns: int) -> None:
        """Return to the state after `columns` columns. Slots evicted since then are restored from
        the journal, so it must go back that far."""
        # The first entry at or after `columns`: nothing was evicted between `columns` and it, so
        # cutting off its last tokens gives the state.
        for index, before in enumerate(self.journal):
            if before.history.columns >= columns:
                self.put_back(index)
                break
        fewer = self.history.columns - columns
        if fewer:
            newest = self.slots.positions(newest_last=True)[:, 0, -fewer:]
            left = self.history.without(newest)
            self.start = left, self.slots.mark(fewer)
            self.take_back()


def _copied(history: History) -> History:
    """A copy that later steps do not change; they replace the tensors in `memory`."""
    other = copy(history)
    other.memory = dict(history.memory)
    return other


_TAKEN = (
    "another thread is changing this cache: a cache serves one thread at a time; give each thread "
    "its own cache, such as a fork, or guard the cache with a lock"
)


class Turn:
    """A reentrant lock, held during a change. It never blocks: a second thread gets a StateError.

    Copies are unlocked.

    Attributes:
        entries: number of times the lock was taken. While it stays the same, so does the layer.
    """

    def __init__(self) -> None:
        self._lock = RLock()
        self.entries = 0

    def __enter__(self) -> None:
        if not self._lock.acquire(False):
            raise StateError(_TAKEN)
        self.entries += 1

    def continue_from(self, entries: int) -> None:
        """Take the turn; raise StateError if it was taken since its count was `entries`."""
        with self:
            if self.entries != entries + 1:
                raise StateError(_TAKEN)
            self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def __deepcopy__(self, memo: dict[int, Any]) -> Turn:
        return Turn()

    def __reduce__(self) -> tuple[type[Turn], tuple[()]]:
        return Turn, ()
