"""Drafts: the part of `LayerCache` that takes tokens back, such as drafts that were rejected.

While `record_past` is set, nothing is freed. A layer whose evictions depend on positions only feeds
a chunk of drafts at once and evicts after the next crop. Any other layer decides after each token,
as it would without drafts, and evicted slots are hidden until the crop: at position -1, where no
query sees them. Then the state before a token is that of a few small planes and the lengths.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from copy import copy
from typing import NamedTuple

import torch
from torch import Tensor

from kvkeep.attention import Attend
from kvkeep.codec import Codec
from kvkeep.errors import RollbackError, StateError, UnsupportedError
from kvkeep.layer.history import History
from kvkeep.layer.reaching import Reaching
from kvkeep.layer.step import Phases, StepInputs, driven
from kvkeep.layer.turn import Turn
from kvkeep.planes import POSITION, Reach
from kvkeep.policy import Observation


class Before(NamedTuple):
    """A layer's state before a token, as far as later steps change it in place. `planes` are copies
    of the positions and the policy's planes; `mark` and `hidden` are those of the slots."""

    history: History
    mark: tuple[int, ...]
    hidden: int
    planes: Mapping[str, Tensor]


class Drafts(Reaching, ABC):
    """The part of `LayerCache` that takes tokens back."""

    key_codec: Codec
    readers: int
    turn: Turn
    by_token: bool
    """Whether the policy decides by more than positions, so that each draft is fed by itself."""
    _begun: tuple[History, tuple[int, ...]] | None
    _chunk: Tensor | None
    _planes_of_policy: tuple[str, ...]
    _writing: bool
    _moving: bool
    _journal: list[Before]  # the states before the tokens that can be taken back, the oldest first

    # -- taking back ------------------------------------------------------------------------

    @property
    def rollback_limit(self) -> int:
        """How many of the newest tokens `crop` can remove exactly."""
        oldest = self._journal[0].history if self._journal else self.past
        before = oldest.columns - oldest.floor if self.policy.rollback else 0
        return self.past.columns - oldest.columns + before

    def require_rollback(self, tokens: int) -> None:
        """Raise RollbackError when the newest `tokens` tokens cannot be removed."""
        if tokens < 0:
            raise RollbackError(
                f"crop({-tokens}) is positive; to remove the newest {-tokens} tokens, call "
                f"crop({tokens})"
            )
        if tokens > self.rollback_limit:
            raise RollbackError(
                f"crop of {tokens} tokens, but {self.rollback_limit} can be removed exactly: "
                f"{self.past.columns} were fed{self._why_lasting}"
            )

    @property
    def _why_lasting(self) -> str:
        """Why some tokens cannot be removed, and the remedy; empty if all of them can."""
        policy, again = self.policy, "reset() and feed the tokens again"
        if not policy.rollback:
            return (
                f", and policy {policy.name} cannot undo a step; set record_past before it, "
                f"{again}, or use keep_all"
            )
        if not self.past.floor:
            return ""
        if not policy.evicts and self.key_codec.block == 1:
            return f", and the tokens of images share positions; {again}"
        if not policy.evicts:
            codec = self.key_codec.name
            return f", and codec {codec} encodes tokens in blocks; {again}, or use int8"
        if self.window is not None and policy.reach == Reach(self.window):
            return f", and {self.window.words} drops the older ones; {again}"
        return f", and policy {policy.name} evicted some; {again}, or use keep_all"

    def crop(self, tokens: int) -> None:
        """Remove the newest -`tokens` columns (tokens <= 0) of every row, padding included. What is
        left is certain then: hidden slots are freed, and the policy evicts down to its budget.

        Raises:
            RollbackError: `tokens` is positive, or -`tokens` exceeds `rollback_limit`.
        """
        self.mend()
        self.require_rollback(-tokens)
        with self.turn:
            unread = self._forget_readings()
            self._return_to(self.past.columns + tokens)
            if self.record_past or unread or self._journal:
                self._fit()

    def _return_to(self, columns: int) -> None:
        """Return to the state after `columns` columns, which `rollback_limit` allows."""
        # The tokens before an entry, back to the previous one, were fed without a decision.
        for index, before in enumerate(self._journal):
            if before.history.columns >= columns:
                self._put_back(index)
                break
        fewer = self.past.columns - columns
        if fewer:
            left = self.past.without(self._slots.newest_positions(fewer))
            self._begun = left, self._slots.mark(fewer)
            self._take_back()

    def _put_back(self, index: int) -> None:
        """Return to the state in an entry of the journal."""
        before = self._journal[index]
        self._moving = True
        self._forget_readings()
        self._slots.cut(before.mark)
        changed = dict(before.planes)
        if not self._slots.hidden:  # no position has changed, and frozen ones cannot be written
            changed.pop(POSITION, None)
        planes = self._slots.evictable()
        with torch.inference_mode():  # allows in-place changes of planes made in any mode
            for name, plane in changed.items():
                planes[name].copy_(plane)
                self._slots.keep(name, planes[name])
        self._slots.hidden = before.hidden
        self.past = copied(before.history)
        del self._journal[index:]
        if not self.past.columns:
            self._forget()
        self._moving = self._writing = False

    # -- recording --------------------------------------------------------------------------

    @property
    def _journaled(self) -> bool:
        """Whether the layer records the state before each draft; otherwise it only waits."""
        return self.by_token or self._slots.block > 1

    def require_recordable(self) -> None:
        """Raise UnsupportedError if the layer cannot decide about drafts as it would without."""
        if self.readers and self._journaled:
            raise UnsupportedError(
                f"policy {self.policy.name} and codec {self.key_codec.name} decide after each "
                "draft, but other layers attend to this layer's slots after all of them; use "
                "keep_all or a window with another codec, or do not draft"
            )

    def _divides(self, n: int) -> bool:
        """Whether a step of n tokens is made in pieces. Layers that attend to this layer's slots
        after its step see its whole chunk, which then evicts nothing before the crop."""
        return self.record_past and not self.readers and (self._journaled or n > 1)

    def _note(self, n: int) -> None:
        """Record the state before n tokens, unless they are certain.

        Raises:
            StateError: the layer must see them one by one.
        """
        columns = self.past.columns
        if not (self.record_past and self._journaled and columns + n > self.prompt.columns):
            return
        if self.by_token and n > 1:
            remedy = "" if self.readers else "use step(), or "
            raise StateError(
                f"{n} tokens are given at once while record_past is set, but policy "
                f"{self.policy.name} decides after each; {remedy}give one at a time"
            )
        del self._journal[self._entries :]
        names = (*self._planes_of_policy, POSITION) if columns else ()
        planes = self._slots.evictable() if columns else {}
        held = {name: planes[name].clone() for name in names}
        history = copied(self.past)
        self._journal.append(Before(history, self._slots.mark(), self._slots.hidden, held))

    @property
    def _entries(self) -> int:
        """How many entries the journal has; those of steps that were taken back do not count."""
        fed = self.past.columns
        return sum(before.history.columns < fed for before in self._journal)

    def _together(self, left: int) -> int:
        """How many of the next `left` tokens are fed at once: those that would be without drafts,
        and more only if no decision comes between them."""
        certain = self.prompt.columns - self.past.columns
        if certain > 0:
            return min(left, certain, self.prompt.chunk or certain)
        return 1 if self.by_token or self._slots.fills(left) else left

    def _recorded(self, inputs: StepInputs, attend: Attend | None) -> Tensor:
        """A step whose tokens may be taken back, in pieces. If it fails, it is undone as a whole;
        or, if tokens of the prompt have changed what cannot be undone, every later call raises
        until `reset`.

        Raises:
            UnsupportedError: some tokens see later ones, beyond their piece.
        """
        self._require_pieces_suffice(inputs)
        entries, n, at = self._entries, inputs.q.shape[2], 0
        start = self.past, self._slots.mark()
        if self._slots.frozen.hides and self.by_token:
            self._slots.thaw()  # it leaves hidden slots out, so lengths change
        found: list[Tensor] = []
        try:
            while at < n:
                count = self._together(n - at)
                piece = inputs if count == n else inputs.part(at, count)
                found.append(driven(self._undone(piece, packs=attend is None), attend))
                at += count
        except BaseException:
            if len(self._journal) > entries:
                self._put_back(entries)
            if self.past.columns > start[0].columns and not self._moving:
                self._moving = not self.policy.rollback or self.past.floor != start[0].floor
                if not self._moving:
                    self._begun = start
                    self._take_back()
            raise
        return found[0] if len(found) == 1 else torch.cat(found, dim=2)

    def _require_pieces_suffice(self, inputs: StepInputs) -> None:
        until, n = inputs.until, inputs.q.shape[2]
        if until is None or not self._journaled:
            return
        device = until.device
        position = self.next_positions(n, device) if inputs.position is None else inputs.position
        certain = max(0, min(n, self.prompt.columns - self.past.columns))
        chunk, token = self.prompt.chunk or max(1, certain), torch.arange(n, device=device)
        stop = torch.where(token < certain, (token // chunk + 1) * chunk, token + 1)
        last = torch.where(token < certain, stop.clamp(max=certain), stop) - 1
        position = position.to(device)
        if bool(((until > position[..., last]) & (until > position)).any()):
            raise UnsupportedError(
                "some tokens see later ones, such as those of an image, but while drafts are "
                f"recorded policy {self.policy.name} and codec {self.key_codec.name} take tokens "
                "one by one; feed the prompt before, or do not draft"
            )

    def _accept(self) -> None:
        """Make the tokens certain that could be taken back."""
        if self._journal or self._slots.hidden:
            with self.turn:
                self._fit()

    # -- what LayerCache does ---------------------------------------------------------------

    @abstractmethod
    def next_positions(self, n: int, device: torch.device, real: Tensor | None = None) -> Tensor:
        """See `History.next_positions`."""

    @abstractmethod
    def mend(self) -> None:
        """Remove the tokens that an interrupted step wrote, if there was one."""

    @abstractmethod
    def _undone(self, inputs: StepInputs, *, packs: bool) -> Phases:
        """A step of any kind, which is undone if it fails."""

    @abstractmethod
    def _fit(self, observation: Observation | None = None, *, hide: bool = False) -> None:
        """Evict down to the budget."""

    @abstractmethod
    def _forget_readings(self) -> bool:
        """Expect no readings any more; whether some were expected."""

    @abstractmethod
    def _take_back(self) -> None:
        """Truncate to the state in `_begun`."""

    @abstractmethod
    def _forget(self) -> None:
        """Remove all tokens."""


def copied(history: History) -> History:
    """A copy that later steps do not change: they replace the tensors in `memory`."""
    other = copy(history)
    other.memory = dict(history.memory)
    return other
