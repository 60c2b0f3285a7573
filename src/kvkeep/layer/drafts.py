"""Drafts: removes the newest tokens of a layer again, such as rejected drafts.

While `record_past` is set, no slot is freed. If evictions depend on positions alone, the layer
writes a chunk of drafts at once and evicts after the next crop. Any other layer settles after each
draft, as in normal decoding, and hides evicted slots (position -1, which no query sees) until the
crop. So the state before a token consists of lengths and a few small planes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvkeep.attention import Attend
from kvkeep.errors import RollbackError, UnsupportedError
from kvkeep.layer.cursor import Cursor, State
from kvkeep.layer.settling import Settler
from kvkeep.layer.setup import Setup
from kvkeep.layer.step import StepInputs, driven
from kvkeep.layer.writing import Writer


class Drafts:
    """Feeds drafts to a layer, and removes the newest tokens."""

    def __init__(self, setup: Setup, cursor: Cursor, settler: Settler, writer: Writer) -> None:
        self._setup, self._cursor, self._settler, self._writer = setup, cursor, settler, writer
        self._policy, self._codec = setup.policy, setup.codecs.key

    @property
    def rollback_limit(self) -> int:
        """Number of newest tokens that `crop` can remove exactly."""
        history, journal = self._cursor.history, self._cursor.journal
        oldest = journal[0].history if journal else history
        before = oldest.columns - oldest.floor if self._policy.rollback else 0
        return history.columns - oldest.columns + before

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
                f"{self._cursor.history.columns} were fed{self._why_lasting}"
            )

    @property
    def _why_lasting(self) -> str:
        """Why some tokens cannot be removed, and the remedy; empty if `crop` can remove all."""
        policy, again = self._policy, "reset() and feed the tokens again"
        if not policy.rollback:
            return (
                f", and policy {policy.name} cannot undo a step; set record_past before it, "
                f"{again}, or use keep_all"
            )
        if not self._cursor.history.floor:
            return ""
        if not policy.evicts and not self._cursor.slots.late:
            return f", and the tokens of images share positions; {again}"
        if not policy.evicts:
            return f", and codec {self._codec.name} has encoded some; {again}, or use int8"
        if self._setup.sight.own_limit:
            return f", and {self._setup.sight.own_limit} drops the older ones; {again}"
        return f", and policy {policy.name} evicted some; {again}, or use keep_all"

    def crop(self, tokens: int) -> None:
        """See `LayerCache.crop`."""
        cursor = self._cursor
        with cursor.turn:
            cursor.mend()
            self.require_rollback(-tokens)
            unread = cursor.forget_readings()
            cursor.return_to(cursor.history.columns + tokens)
            if cursor.record_past or unread or cursor.journal:
                self._settler.fit()

    # -- recording --------------------------------------------------------------------------

    def require_recordable(self) -> None:
        """Raise UnsupportedError if evictions with drafts would differ from evictions without."""
        if self._cursor.readers and self._settler.journals:
            raise UnsupportedError(
                f"policy {self._policy.name} and codec {self._codec.name} decide after each "
                "draft, but other layers attend to this layer's slots after all of them; use "
                "keep_all or a window with another codec, or do not draft"
            )

    def divides(self, n: int) -> bool:
        """Whether a step of n tokens is divided into pieces. It is not if other layers attend to
        this layer's slots: they must see the whole chunk, so nothing is evicted before the crop."""
        return (
            self._cursor.record_past
            and not self._cursor.readers
            and (self._settler.journals or n > 1)
        )

    def _together(self, left: int) -> int:
        """How many of the next `left` tokens form a piece: as many as a step without drafts would
        have, or more if nothing is evicted or encoded in between."""
        prompt = self._cursor.prompt
        certain = prompt.columns - self._cursor.history.columns
        if certain > 0:
            return min(left, certain, prompt.chunk or certain)
        return 1 if self._setup.by_token or self._cursor.slots.waiting(None, left) else left

    def run(self, inputs: StepInputs, attend: Attend | None) -> Tensor:
        """A step in pieces that a crop can remove. If it fails, the whole step is undone; if that
        is impossible because prompt tokens have evicted slots, every later call raises until
        `reset`.

        Raises:
            UnsupportedError: a token sees tokens of a later piece.
        """
        self._require_pieces_suffice(inputs)
        cursor = self._cursor
        entries, n, at = cursor.entries, inputs.q.shape[2], 0
        start = cursor.history, cursor.slots.mark()
        if cursor.slots.frozen.hides and self._setup.by_token:
            cursor.slots.thaw()  # before marks are taken, because it drops hidden slots
        found: list[Tensor] = []
        try:
            while at < n:
                count = self._together(n - at)
                piece = inputs if count == n else inputs.part(at, count)
                found.append(driven(self._writer.phases(piece, packs=attend is None), attend))
                at += count
        except BaseException:
            if len(cursor.journal) > entries:
                cursor.put_back(entries)
            if cursor.history.columns > start[0].columns and cursor.state is not State.MOVING:
                if self._policy.rollback and cursor.history.floor == start[0].floor:
                    cursor.start = start
                    cursor.take_back()
                else:
                    cursor.state = State.MOVING
            raise
        return found[0] if len(found) == 1 else torch.cat(found, dim=2)

    def _require_pieces_suffice(self, inputs: StepInputs) -> None:
        until, n, cursor = inputs.until, inputs.q.shape[2], self._cursor
        if until is None or not self._settler.journals:
            return
        device = until.device
        position = (
            cursor.history.next_positions(n, device) if inputs.position is None else inputs.position
        )
        certain = max(0, min(n, cursor.prompt.columns - cursor.history.columns))
        chunk, token = cursor.prompt.chunk or max(1, certain), torch.arange(n, device=device)
        stop = torch.where(token < certain, (token // chunk + 1) * chunk, token + 1)
        last = torch.where(token < certain, stop.clamp(max=certain), stop) - 1
        position = position.to(device)
        if bool(((until > position[..., last]) & (until > position)).any()):
            raise UnsupportedError(
                "some tokens see later tokens, as within an image, but while drafts are "
                f"recorded policy {self._policy.name} and codec {self._codec.name} take tokens "
                "one by one; feed the prompt before drafts are recorded, or do not draft"
            )
