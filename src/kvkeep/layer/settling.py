"""Settling: a layer that passes each step to its policy and frees slots."""

from __future__ import annotations

import torch
from torch import Tensor

from kvkeep.attention import Centre
from kvkeep.attention.centre import Turns
from kvkeep.checks import Checks
from kvkeep.codec import Codec
from kvkeep.layer.cursor import Cursor
from kvkeep.layer.sight import Sight
from kvkeep.layer.slots import Codecs
from kvkeep.planes import POSITION, OwnWindow, Planes, positions_of
from kvkeep.policy import Observation, Policy
from kvkeep.rotary import Rotary


class Settling:
    """The part of a layer that holds slots and evicts: after attention the policy observes the
    step, and the layer frees slots down to the budget."""

    policy: Policy
    key_codec: Codec
    value_codec: Codec
    window: OwnWindow | None
    rotary: Rotary | None
    readers: int
    sight: Sight
    cursor: Cursor
    """The slots, the history and the state of the current step."""
    by_token: bool
    """Whether drafts are fed one by one, because the policy decides by more than positions."""
    _planes_of_policy: tuple[str, ...]
    _checks: Checks
    _turns: Turns | None

    def settle(self, observation: Observation | None = None, *, packs: bool = True) -> None:
        """Pass the observation to the policy, then evict down to its budget. Without an observation
        the policy uses earlier ones. While `record_past` is set, no slot is freed, so that the next
        `crop` can take tokens back."""
        with self.cursor.turn:
            self._settle_now(observation, packs=packs)

    def _settle_now(self, observation: Observation | None, *, packs: bool) -> None:
        cursor = self.cursor
        if observation is not None:
            self.policy.require_shown(observation)
        if not cursor.tentative:
            self._fit(observation)
        elif self._journaled and cursor.chunk is not None and cursor.chunk.shape[-1] == 1:
            self._fit(observation, hide=True)
        if packs:
            self._pack()

    @property
    def _journaled(self) -> bool:
        """Whether the layer records the state before each draft. False: evictions only wait."""
        return self.by_token or self.cursor.slots.block > 1

    def seeing(self, observation: Observation | None) -> Observation:
        """The observation, completed with the layer's own state."""
        cursor, codecs = self.cursor, self.codecs
        return (observation or Observation())._replace(
            position=cursor.chunk,
            newest=cursor.history.newest,
            window=self.window,
            rotary=self.rotary,
            state=cursor.history.memory,
            keys=self._keys,
            values=lambda planes: codecs.values(planes, torch.float32),
        )

    @property
    def codecs(self) -> Codecs:
        """The codecs of encoded slots."""
        return Codecs(self.key_codec, self.value_codec)

    @property
    def centre(self) -> Centre | None:
        """What the keys of the slots lack; None: nothing. Set by the first chunk, for good."""
        mean, columns = self.cursor.history.centre, self.cursor.history.columns
        return None if mean is None else Centre(mean, self.turns_for(mean, columns))

    def turns_for(self, like: Tensor, positions: int) -> Turns:
        """The turns of keys like these (B, H, ..., Dk), up to so many positions."""
        turns = self._turns
        if turns is None or turns.table.device != like.device or not turns.covers(positions):
            turns = Turns.of(self.rotary, like.shape[-1], positions, like.device)
            self._turns = turns
        return turns

    def _keys(self, planes: Planes) -> Tensor:
        keys, centre = self.codecs.keys(planes, torch.float32), self.centre
        return keys if centre is None else centre.added(keys, planes[POSITION])

    def _evict(
        self, count: int, observation: Observation | None = None, *, hide: bool = False
    ) -> None:
        """Pass the observation, if any, to the policy, and free `count` slots; with `hide`, hide
        them until the next crop. A `count` of 0 or less frees none."""
        cursor, slots = self.cursor, self.cursor.slots
        policy = self.policy.at(cursor.history.columns)
        observes = observation is not None and policy.observes
        if not observes and count <= 0:
            return
        planes, seen = slots.evictable(), self.seeing(observation)
        with cursor.moved():
            if observes:
                with torch.inference_mode():  # allows in-place changes of planes made in any mode
                    policy.observe(planes, seen)
                    for name in self._planes_of_policy:
                        slots.keep(name, planes[name])
            if count > 0:
                victims = policy.victims(count, planes, seen)
                if cursor.evicted is not None:
                    cursor.evicted.append(positions_of(victims, planes))
                if hide:
                    slots.hide(victims, count)
                else:
                    slots.evict(victims)
                cursor.history.floor = cursor.history.columns

    def _fit(self, observation: Observation | None = None, *, hide: bool = False) -> None:
        """Evict down to the budget, and encode full blocks. With `hide`, no slot is freed;
        otherwise all tokens fed become certain."""
        cursor, slots = self.cursor, self.cursor.slots
        if slots.hidden and not hide:
            self._evict(0, observation)  # the mass counts hidden slots too
            observation = None
            with cursor.moved():
                if not slots.free_hidden():
                    cursor.history.floor = cursor.history.columns
        budget = self.policy.at(cursor.history.columns).budget
        surplus = 0 if budget is None else slots.surplus(budget)
        self._evict(surplus, observation, hide=hide)
        if slots.waiting:
            with cursor.moved():
                if not slots.encode_waiting(hide=hide):
                    cursor.history.floor = cursor.history.columns
        if not hide:
            cursor.journal = []

    def accept(self) -> None:
        """Make all draft tokens certain."""
        if self.cursor.journal or self.cursor.slots.hidden:
            with self.cursor.turn:
                self._fit()

    @property
    def _packs(self) -> bool:
        """Whether empty slots may be freed. Not while decisions are recorded or replayed: they
        count empty slots."""
        return self.cursor.evicted is None and not self.policy.counts_empty

    def _pack(self) -> None:
        """Free the empty slots after a chunk with padding, if there are many."""
        cursor, chunk = self.cursor, self.cursor.chunk
        if chunk is None or chunk.dim() != 2 or chunk.shape[1] == 1:
            return
        if cursor.tentative or not self._packs:
            return
        with cursor.moved():
            if cursor.pack():
                cursor.history.floor = cursor.history.columns
