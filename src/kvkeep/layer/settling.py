"""Settling: a layer that passes each step to its policy and frees slots, also after other layers
have read them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from kvkeep.attention import Attend, Centre, View, dispatch
from kvkeep.attention.centre import Turns
from kvkeep.checks import Checks, wants_gradients
from kvkeep.codec import Codec
from kvkeep.errors import StateError
from kvkeep.layer.cursor import Cursor
from kvkeep.layer.sight import Sight
from kvkeep.layer.slots import Codecs, Decode
from kvkeep.layer.step import Slopes, StepInputs
from kvkeep.planes import POSITION, OwnWindow, Planes, positions_of
from kvkeep.policy import Observation, Policy
from kvkeep.rotary import Rotary
from kvkeep.storage import Storage


class Settling:
    """The part of a layer that holds slots and evicts: after attention the policy observes the
    step, and the layer frees slots down to the budget.

    `readers` is the number of layers without slots that attend to this layer's slots after its step
    in the same forward (readings). The policy then observes and evicts after the last reading, so
    each reading attends to the same slots as the step. The policy observes only the step, not the
    readings: the number of a reading's queries depends on which logits the caller requests, and
    that must not decide which slots stay.
    """

    policy: Policy
    key_codec: Codec
    value_codec: Codec
    window: OwnWindow | None
    rotary: Rotary | None
    slopes: Slopes | None
    readers: int
    sight: Sight
    cursor: Cursor
    """The slots, the history and the state of the current step."""
    by_token: bool
    """Whether drafts are fed one by one, because evictions depend on more than positions."""
    _planes_of_policy: tuple[str, ...]
    _checks: Checks
    _turns: Turns | None

    def settle(self, observation: Observation | None = None, *, packs: bool = True) -> None:
        """Pass the observation to the policy, then evict down to its budget. Without an observation
        the policy evicts by earlier ones. While `record_past` is set, no slot is freed, so that the
        next `crop` can remove tokens."""
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
        """Whether the layer records the state before each draft. False: it delays evictions until
        the crop."""
        return self.by_token or self.cursor.slots.block > 1

    def seeing(
        self, observation: Observation | None, decoded: Callable[[Decode, Planes], Tensor]
    ) -> Observation:
        """The observation, completed with the layer's own state. `decoded`: decodes the slots that
        the policy is shown."""
        cursor = self.cursor

        def keys(planes: Planes) -> Tensor:
            found, centre = decoded(Codecs.keys, planes), self.centre
            return found if centre is None else centre.added(found, planes[POSITION])

        return (observation or Observation())._replace(
            position=cursor.chunk,
            newest=cursor.history.newest,
            window=self.window,
            rotary=self.rotary,
            state=cursor.history.memory,
            plain=cursor.slots.plain,
            keys=keys,
            values=partial(decoded, Codecs.values),
        )

    @property
    def codecs(self) -> Codecs:
        """The codecs of encoded slots."""
        return Codecs(self.key_codec, self.value_codec)

    @property
    def centre(self) -> Centre | None:
        """The centre that was subtracted from the slots' keys, measured on the first chunk; None:
        no centre."""
        mean, columns = self.cursor.history.centre, self.cursor.history.columns
        return None if mean is None else Centre(mean, self.turns_for(mean, columns))

    def turns_for(self, like: Tensor, positions: int) -> Turns:
        """The turns for keys of the width and device of `like`, (B, H, ..., Dk), for at least
        `positions` positions."""
        turns = self._turns
        if turns is None or turns.table.device != like.device or not turns.covers(positions):
            turns = Turns.of(self.rotary, like.shape[-1], positions, like.device)
            self._turns = turns
        return turns

    def _observe(self, observation: Observation | None) -> None:
        """Pass the observation, if any, to the policy."""
        cursor, slots = self.cursor, self.cursor.slots
        policy = self.policy.at(cursor.history.columns)
        if observation is None or not policy.observes:
            return
        planes, seen = slots.observed(), self.seeing(observation, slots.observed_decoded)
        with cursor.moved(), torch.inference_mode():  # changes planes made in any mode in place
            policy.observe(planes, seen)
            for name in self._planes_of_policy:
                slots.keep(name, planes[name])

    def _evict(
        self, count: int, observation: Observation | None = None, *, hide: bool = False
    ) -> None:
        """Free `count` slots, or with `hide` hide them until the next crop. A `count` of 0 or less
        frees none. `observation`: the step that the policy has observed. The caller has called
        `moved`."""
        if count <= 0:
            return
        cursor, slots = self.cursor, self.cursor.slots
        policy = self.policy.at(cursor.history.columns)
        planes, seen = slots.evictable(), self.seeing(observation, slots.decoded)
        victims = policy.victims(count, planes, seen)
        if cursor.evicted is not None:
            cursor.evicted.append(positions_of(victims, planes))
        if hide:
            slots.hide(victims, count)
        else:
            slots.evict(victims)
        cursor.history.floor = cursor.history.columns

    def _fit(self, observation: Observation | None = None, *, hide: bool = False) -> None:
        """Encode the tokens that leave the tail, and evict down to the budget. With `hide`, no slot
        is freed; otherwise all tokens fed become certain."""
        cursor, slots = self.cursor, self.cursor.slots
        self._observe(observation)  # the mass includes hidden slots, so before freeing them
        budget = self.policy.at(cursor.history.columns).budget
        with cursor.moved():  # once tokens are encoded, the step cannot be undone
            exact = hide or not slots.hidden or slots.free_hidden()
            if waiting := slots.waiting(budget):
                exact &= slots.encode_waiting(waiting, hide=hide)
            if not exact:
                cursor.history.floor = cursor.history.columns
            if budget is not None:
                self._evict(slots.surplus(budget), observation, hide=hide)
        if not hide:
            cursor.journal = []

    def accept(self) -> None:
        """Make all draft tokens certain."""
        if self.cursor.journal or self.cursor.slots.hidden:
            with self.cursor.turn:
                self._fit()

    @property
    def _packs(self) -> bool:
        """Whether empty slots may be freed. Not while evictions are recorded or replayed, because
        they count empty slots."""
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

    @property
    def unread(self) -> int:
        """Number of `readers` that have yet to attend to the last step's slots."""
        return self.cursor.unread

    def read(self, inputs: StepInputs, attend: Attend | None = None) -> Tensor:
        """Attend to the slots of the last step. Nothing is written.

        Args:
            inputs: queries (B, Hq, m, Dk) of the newest m tokens of the step's chunk, and the
                step's keys and values.
            attend: replaces the attention function; None uses `dispatch`.

        Returns:
            (B, Hq, m, Dv)

        Raises:
            StateError: no step was made, or all readings of the last step are done.
            ShapeError: the queries do not fit the keys.
        """
        q, k, cursor = inputs.q, inputs.k, self.cursor
        with cursor.turn:
            if not cursor.unread:
                raise StateError(
                    "a layer attends to another layer's slots, but all "
                    f"{self.readers} readings of the last step are done; feed that layer first"
                )
            own = k[:, :, -q.shape[2] :]
            self._checks.queries(q, own, inputs.sinks, inputs.softcap, self.slopes)
            self.check_gradients(q)
            view = self._view(*(cursor.queries or (None, None)))
            # A reading may have fewer queries; the view's limits hold for each of them.
            n = q.shape[2]
            bounds = None if view.bounds is None else view.bounds[..., -n:]
            view = view._replace(position=view.position[..., -n:], bounds=bounds)
            out, _ = (attend or dispatch)(q, view, inputs.options(self.slopes, self.centre))
            if cursor.unread == 1:
                self._settle_now(cursor.observed, packs=attend is None)
                cursor.observed = None
            cursor.unread -= 1  # last, so that after an error the forward counts as interrupted
            return out

    def await_readings(self) -> None:
        """Record, after a native step of one token, that readings follow."""
        self.cursor.queries = None
        self._await_readings()

    def _settle(self, observation: Observation) -> None:
        """Pass the observation to the policy and evict, now or after the readings."""
        if self.readers:
            self._await_readings(observation)
        else:
            self._settle_now(observation, packs=False)

    def _await_readings(self, observation: Observation | None = None) -> None:
        """Record at the end of a step that readings follow."""
        self.cursor.unread, self.cursor.observed = self.readers, observation

    def _view(self, queries: Tensor | None, until: Tensor | None) -> View:
        """The view of queries at the positions `queries`; None: of the newest token."""
        slots, history = self.cursor.slots, self.cursor.history
        if queries is None:
            assert history.geometry is not None
            queries = history.next_positions(1, history.geometry.device) - 1
        hides = slots.frozen.hides or slots.hidden > 0
        return self.sight.after(slots.segments(), queries, history, slots.length, hides, until)

    def check_gradients(self, *tensors: Tensor) -> None:
        """Raise StateError if gradients are required that the storage or a codec does not
        propagate."""
        if wants_gradients(*tensors):
            parts: dict[str, Storage | Codec] = {
                "storage": self.cursor.slots.storage,
                "codec of keys": self.key_codec,
                "codec of values": self.value_codec,
            }
            for kind, part in parts.items():
                if not part.differentiable:
                    raise StateError(
                        f"this cache does not propagate gradients: its {kind} is {part.name!r}; "
                        "run the forward in torch.no_grad(), train with kvkeep.train, or end the "
                        "spec with +plain@concat"
                    )
