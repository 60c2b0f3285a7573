"""Settling: the part of `LayerCache` that shows its policy a step, and frees slots."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from kvkeep.codec import Codec
from kvkeep.layer.drafts import Drafts
from kvkeep.layer.read_again import ReadAgain
from kvkeep.planes import part, positions_of
from kvkeep.policy import Observation
from kvkeep.rotary import Rotary


class Settling(ReadAgain, Drafts):
    """The part of `LayerCache` that follows attention: the policy observes the step, and slots are
    freed down to its budget."""

    value_codec: Codec
    rotary: Rotary | None
    evicted: list[Tensor] | None
    """What `positions_of` gave for each eviction; None: it is not recorded."""

    def settle(self, observation: Observation | None = None, *, packs: bool = True) -> None:
        """Pass the observation to the policy, then evict down to its budget. Without an observation
        the policy chooses by what it observed before. While `record_past` is set, nothing is
        freed, so that the next `crop` can take tokens back."""
        with self.turn:
            self._settle_now(observation, packs=packs)

    def _settle(self, observation: Observation) -> None:
        if self.readers:
            self._await_readings(observation)
        else:
            self._settle_now(observation, packs=False)

    def _settle_now(self, observation: Observation | None, *, packs: bool) -> None:
        if observation is not None:
            self.policy.require_shown(observation)
        if not self._tentative:
            self._fit(observation)
        elif self._journaled and self._chunk is not None and self._chunk.shape[-1] == 1:
            self._fit(observation, hide=True)
        if packs:
            self._pack()

    def seeing(self, observation: Observation | None) -> Observation:
        """The observation, completed with the layer's own state."""
        return (observation or Observation())._replace(
            position=self._chunk,
            newest=self.past.newest,
            window=self.window,
            rotary=self.rotary,
            state=self.past.memory,
            keys=lambda planes: self.key_codec.decode(part(planes, "k"), torch.float32),
            values=lambda planes: self.value_codec.decode(part(planes, "v"), torch.float32),
        )

    def _evict(
        self, count: int, observation: Observation | None = None, *, hide: bool = False
    ) -> None:
        """Pass the observation, if any, to the policy, and free `count` slots, if positive; or
        hide them until the next crop."""
        policy = self.policy.at(self.past.columns)
        observes = observation is not None and policy.observes
        if not observes and count <= 0:
            return
        planes, seen = self._slots.evictable(), self.seeing(observation)
        with self._moved():
            if observes:
                with torch.inference_mode():  # allows in-place changes of planes made in any mode
                    policy.observe(planes, seen)
                    for name in self._planes_of_policy:
                        self._slots.keep(name, planes[name])
            if count > 0:
                victims = policy.victims(count, planes, seen)
                if self.evicted is not None:
                    self.evicted.append(positions_of(victims, planes))
                if hide:
                    self._slots.hide(victims, count)
                else:
                    self._slots.evict(victims)
                self.past.floor = self.past.columns

    def _fit(self, observation: Observation | None = None, *, hide: bool = False) -> None:
        """Evict down to the budget, and encode the tokens whose block is now full. With `hide` no
        slot is freed; otherwise the tokens fed are certain from now on."""
        if self._slots.hidden and not hide:
            self._evict(0, observation)  # the mass counts hidden slots too
            observation = None
            with self._moved():
                self._slots.free_hidden()
                self.past.floor = self.past.columns
        budget = self.policy.at(self.past.columns).budget
        surplus = 0 if budget is None else self._slots.surplus(budget)
        self._evict(surplus, observation, hide=hide)
        if self._slots.waiting:
            with self._moved():
                self._slots.encode_waiting(hide=hide)
                self.past.floor = self.past.columns
        if not hide:
            self._journal = []

    @property
    def _packs(self) -> bool:
        """Whether empty slots may be freed: not while decisions are recorded or replayed, because
        those count empty slots."""
        return self.evicted is None and not self.policy.counts_empty

    def _pack(self) -> None:
        """After a chunk with padding, free its empty slots if there are many."""
        chunk = self._chunk
        if chunk is None or chunk.dim() != 2 or chunk.shape[1] == 1:
            return
        if self._tentative or not self._packs:
            return
        with self._moved():
            if self._packed():
                self.past.floor = self.past.columns

    def _packed(self) -> bool:
        """Move rows of very different lengths to storages of their own; whether that was done."""
        packed = self._slots.pack()
        self._slots = packed or self._slots
        return packed is not None

    @contextmanager
    def _moved(self) -> Iterator[None]:
        """Mark slots as being moved. If the body is interrupted, or fails after it has changed
        slots, the mark stays: the contents of the slots are unknown."""
        mark = self._slots.mark()
        self._moving = True
        try:
            yield
        except Exception:
            # Storages evict all victims or none: with equal lengths, nothing has changed.
            self._moving = self._slots.torn or self._slots.mark() != mark
            raise
        self._moving = False
