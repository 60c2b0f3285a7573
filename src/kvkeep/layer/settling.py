"""Settler: shows each step to a layer's policy, and frees slots down to the budget."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from kvkeep.attention.centre import Asked
from kvkeep.errors import StateError
from kvkeep.layer.centring import Centring
from kvkeep.layer.cursor import Cursor
from kvkeep.layer.setup import Setup
from kvkeep.layer.slots import Codecs, Decode
from kvkeep.planes import POSITION, Planes, positions_of
from kvkeep.policy import Need, Observation, Policy


class Settler:
    """The end of a layer's steps: the policy observes, tokens that leave the tail are encoded, and
    slots over the budget are freed. Callers hold the layer's turn."""

    def __init__(self, setup: Setup, cursor: Cursor, centring: Centring) -> None:
        self._setup, self._cursor, self._centring = setup, cursor, centring
        self.policy = setup.policy

    def settle(self, observation: Observation | None = None, *, packs: bool) -> None:
        """Settle a step; see `LayerCache.settle`. `packs`: free the empty slots of padding,
        if there are many."""
        cursor = self._cursor
        if observation is not None:
            _require_shown(self.policy, observation)
        if not cursor.tentative:
            self.fit(observation)
        elif self.journals and cursor.chunk is not None and cursor.chunk.shape[-1] == 1:
            self.fit(observation, hide=True)
        if packs:
            self.pack()

    @property
    def journals(self) -> bool:
        """Whether the state before each draft is recorded. False: evictions wait for the crop."""
        return self._setup.by_token or self._cursor.slots.late

    def accept(self) -> None:
        """Make all draft tokens certain."""
        if self._cursor.journal or self._cursor.slots.hidden:
            with self._cursor.turn:
                self.fit()

    def fit(self, observation: Observation | None = None, *, hide: bool = False) -> None:
        """Encode the tokens that leave the tail, and evict down to the budget. With `hide`, no slot
        is freed; otherwise all tokens fed become certain."""
        cursor, slots = self._cursor, self._cursor.slots
        budget = self.policy.at(cursor.history.columns).budget
        if slots.waiting(budget):
            self.centre_given()
        with cursor.moved():  # once scores are changed or tokens encoded, no step can be undone
            self._observe(observation)  # the mass includes hidden slots, so before freeing them
            exact = hide or not slots.hidden or slots.free_hidden()
            if waiting := slots.waiting(budget):
                exact &= slots.encode_waiting(waiting, hide=hide)
                exact &= cursor.history.pads is None  # padding leaves a row's order of positions
            if not exact:
                cursor.history.floor = cursor.history.columns
            if budget is not None:
                self.evict(slots.surplus(budget), observation, hide=hide)
        if not hide:
            cursor.journal = []

    def centre_given(self, asked: Asked | None = None) -> None:
        """If the layer began with plain keys, whose centre is not known yet, measure it on them and
        the queries `asked`, and subtract it from them. Precedes writing and encoding."""
        cursor, slots = self._cursor, self._cursor.slots
        history = cursor.history
        if history.centre is not None or not slots.length or not self._setup.codecs.key.centre:
            return
        with cursor.moved():
            slots.thaw()
            observed = slots.observed()
            k, position = observed.planes["k"], observed.planes[POSITION]
            centre = self._centring.of_new(k, position[:, 0], history, asked)
            assert centre is not None  # the codec has one
            observed.write("k", centre.without(k, position).to(k.dtype))
            history.centre = centre.held

    def _observe(self, observation: Observation | None) -> None:
        """Pass the observation, if any, to the policy. The caller has called `moved`."""
        cursor = self._cursor
        policy = self.policy.at(cursor.history.columns)
        if observation is None or not policy.observes:
            return
        observed = cursor.slots.observed()
        planes, seen = observed.planes, self.seeing(observation, observed.decoded)
        with torch.inference_mode():  # changes planes made in any mode in place
            policy.observe(planes, seen)
            for name in self._setup.own:
                observed.write(name, planes[name])

    def drop(self, count: int) -> None:
        """Free the `count` oldest slots that the policy does not protect, before a chunk is
        written. Tokens of the tail among them are encoded first. The caller has called `moved`."""
        slots = self._cursor.slots
        short = count + self.policy.protection.fixed - (slots.length - slots.plain)
        if slots.late and count > 0 and short > 0:
            slots.encode_waiting(min(short, slots.plain))
        self.evict(count)

    def evict(
        self, count: int, observation: Observation | None = None, *, hide: bool = False
    ) -> None:
        """Free `count` slots, or with `hide` hide them until the next crop. A `count` of 0 or less
        frees none. `observation`: the step that the policy has observed. The caller has called
        `moved`."""
        if count <= 0:
            return
        cursor, slots = self._cursor, self._cursor.slots
        policy = self.policy.at(cursor.history.columns)
        planes, seen = slots.evictable(), self.seeing(observation)
        victims = policy.victims(count, planes, seen)
        if cursor.evicted is not None:
            cursor.evicted.append(positions_of(victims, planes))
        if hide:
            slots.hide(victims, count)
        else:
            slots.evict(victims)
        cursor.history.floor = cursor.history.columns

    def seeing(
        self,
        observation: Observation | None,
        decoded: Callable[[Decode, Planes], Tensor] | None = None,
    ) -> Observation:
        """The observation, completed with the layer's own state. `decoded`: decodes the slots that
        the policy is shown; None: by the codecs."""
        history, setup = self._cursor.history, self._setup
        decoded = decoded or setup.decoded

        def keys(planes: Planes) -> Tensor:
            found, centre = decoded(Codecs.keys, planes), self._centring.of(history)
            return found if centre is None else centre.added(found, planes[POSITION])

        return (observation or Observation())._replace(
            position=self._cursor.chunk,
            newest=history.newest,
            window=setup.window,
            rotary=setup.rotary,
            state=history.memory,
            plain=self._cursor.slots.plain,
            keys=keys,
            values=partial(decoded, Codecs.values),
        )

    @property
    def packs(self) -> bool:
        """Whether empty slots may be freed. Not while evictions are recorded or replayed, because
        they count empty slots."""
        return self._cursor.evicted is None and not self.policy.counts_empty

    def pack(self) -> None:
        """Free the empty slots after a chunk with padding, if there are many."""
        cursor, chunk = self._cursor, self._cursor.chunk
        if chunk is None or chunk.dim() != 2 or chunk.shape[1] == 1:
            return
        if cursor.tentative or not self.packs:
            return
        with cursor.moved():
            if cursor.pack():
                cursor.history.floor = cursor.history.columns


def _require_shown(policy: Policy, step: Observation) -> None:
    """Raise StateError if a step lacks the mass or queries that its policy needs."""
    for need in policy.needs & {Need.MASS, Need.QUERIES}:
        if getattr(step, need.value) is None:
            raise StateError(
                f"policy {policy.name} needs the {need.value} of the step; give "
                f"settle(Observation({need.value}=...)), or use step()"
            )
