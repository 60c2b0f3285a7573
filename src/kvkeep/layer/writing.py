"""Writer: writes chunks of tokens to a layer's slots, in steps that are undone if they fail."""

from __future__ import annotations

import torch
from torch import Tensor

from kvkeep.attention import Attend, Centre, View, dispatch
from kvkeep.attention.centre import Asked
from kvkeep.checks import Checks, check_places, check_range, wants_gradients
from kvkeep.codec import Codec
from kvkeep.errors import StateError
from kvkeep.geometry import Geometry
from kvkeep.layer.centring import Centring
from kvkeep.layer.cursor import Cursor, State
from kvkeep.layer.settling import Settler
from kvkeep.layer.setup import Setup
from kvkeep.layer.step import Phases, StepInputs, phases
from kvkeep.planes import POSITION
from kvkeep.policy import Arrivals, Need, Observation
from kvkeep.storage import Storage
from kvkeep.storage.base import require_within


class Writer:
    """A layer's steps by extend, attend and settle. `decode.plan` makes steps of one token in one
    call. Implements `Step`."""

    def __init__(self, setup: Setup, cursor: Cursor, centring: Centring, settler: Settler) -> None:
        self.setup, self.cursor, self.centring, self._settler = setup, cursor, centring, settler
        self.policy, self.slopes = setup.policy, setup.slopes
        self.checks = Checks()

    @property
    def centre(self) -> Centre | None:
        """See `Step`."""
        return self.centring.of(self.cursor.history)

    def extend(
        self,
        k: Tensor,
        v: Tensor,
        position: Tensor | None,
        until: Tensor | None = None,
        q: Tensor | None = None,
    ) -> View:
        """See `LayerCache.extend` and `Step`."""
        cursor, codecs = self.cursor, self.setup.codecs
        cursor.require_read()
        cursor.mend()
        self.checks.chunk(k, v, position, cursor.history.geometry)
        if until is not None:
            check_places("until", until, k.shape[0], k.shape[2])
            check_range("until", until)
        self.check_gradients(k, v)
        n = k.shape[2]
        self.require(n)
        if cursor.history.geometry is None:  # raises if a codec does not support the width
            codecs.key.planes(k.shape[3], k.dtype)
            codecs.value.planes(v.shape[3], v.dtype)
        position = (
            cursor.history.next_positions(n, k.device)
            if position is None
            else position.to(k.device)
        )
        asked = None if q is None else Asked(q, position)
        if asked is not None or self.policy.reach is not None:
            self._settler.centre_given(asked)
        # First free the slots that no later query can reach, so that a sliding window reuses them.
        if self.policy.reach is not None:
            with cursor.moved():
                self._settler.drop(cursor.slots.length - self.setup.sight.reachable(cursor))
        self._note(n)
        waits = asked is None and cursor.slots.late and cursor.history.centre is None
        centre = None if waits else self.centring.of_new(k, position, cursor.history, asked)
        coded = k if centre is None else centre.without(k, position)
        own = self.own_planes(k, v, position, None if waits else coded)
        cursor.begin()
        try:
            cursor.slots.add(coded, v, own)
            if cursor.history.geometry is None:
                cursor.history.geometry = Geometry.of(k, v)
            cursor.chunk = position
            cursor.history, queries = cursor.history.feed(
                position,
                k.shape[0],
                shows_padding=self.policy.shows_padding,
                holes=cursor.holes_after is not None,
            )
            cursor.history.centre = None if centre is None else centre.held
        except BaseException:
            cursor.take_back()
            raise
        cursor.state = State.IDLE
        if until is not None:
            until = torch.where(position < 0, -1, until.to(k.device)).to(torch.int32)
        cursor.queries = (queries, until) if cursor.readers else None
        return self.view(queries, until)

    def view(self, queries: Tensor | None, until: Tensor | None) -> View:
        """The view of queries at the positions `queries`; None: of the newest token."""
        slots, history = self.cursor.slots, self.cursor.history
        if queries is None:
            assert history.geometry is not None
            queries = history.next_positions(1, history.geometry.device) - 1
        hides = slots.frozen.hides or slots.hidden > 0
        segments, length = slots.segments(), slots.length
        return self.setup.sight.after(segments, queries, history, length, hides, until)

    def settle(self, observation: Observation) -> None:
        """Pass the observation to the policy and evict, now or after the readings."""
        if self.cursor.readers:
            self.cursor.await_readings(observation)
        else:
            self._settler.settle(observation, packs=False)

    def read(self, inputs: StepInputs, attend: Attend | None = None) -> Tensor:
        """Attention of a later layer, which has no slots, to the slots of the last step.

        The policy observes and evicts after the last reading, so each reading attends to the same
        slots as the step. The policy observes only the step, not the readings: the number of a
        reading's queries depends on which logits the caller requests, and that must not decide
        which slots stay.
        """
        q, k, cursor = inputs.q, inputs.k, self.cursor
        with cursor.turn:
            if not cursor.unread:
                raise StateError(
                    "a layer attends to another layer's slots, but all "
                    f"{cursor.readers} readings of the last step are done; feed that layer first"
                )
            n = q.shape[2]
            self.checks.queries(q, k[:, :, -n:], inputs.sinks, inputs.softcap, self.slopes)
            self.check_gradients(q)
            view = self.view(*(cursor.queries or (None, None)))
            # A reading may have fewer queries; the view's limits hold for each of them.
            bounds = None if view.bounds is None else view.bounds[..., -n:]
            view = view._replace(position=view.position[..., -n:], bounds=bounds)
            out, _ = (attend or dispatch)(q, view, inputs.options(self.slopes, self.centre))
            if cursor.unread == 1:
                self._settler.settle(cursor.observed, packs=attend is None)
                cursor.observed = None
            cursor.unread -= 1  # last, so that after an error the forward counts as interrupted
            return out

    def _note(self, n: int) -> None:
        """Record the state before n tokens, if they are drafts.

        Raises:
            StateError: the policy requires drafts one by one.
        """
        cursor = self.cursor
        drafts = cursor.record_past and cursor.history.columns + n > cursor.prompt.columns
        if not drafts or not self._settler.journals:
            return
        if self.setup.by_token and n > 1:
            remedy = "" if cursor.readers else "use step(), or "
            raise StateError(
                f"{n} tokens are given at once while record_past is set, but policy "
                f"{self.policy.name} decides after each token; {remedy}give one token at a time"
            )
        cursor.note(self.setup.own)

    def own_planes(
        self, k: Tensor, v: Tensor, position: Tensor, coded: Tensor | None = None
    ) -> dict[str, Tensor]:
        """The planes of new tokens other than keys and values. `coded`: the keys to encode, less
        their centre; None: the centre is not known yet, so it is estimated from `k`."""
        policy, (rows, heads, n, _) = self.policy, k.shape
        planes: dict[str, Tensor] = {}
        if self.setup.own:
            error = None
            if Need.ENCODE_ERROR in policy.needs:
                if coded is None:
                    centre = self.centring.of_new(k, position, self.cursor.history)
                    coded = k if centre is None else centre.without(k, position)
                error = self.setup.codecs.errors(coded, v)
            planes |= policy.enter(
                Arrivals(k.detach(), v.detach(), position, error, self.setup.rotary)
            )
        place = position.to(torch.int32) if position.dim() == 1 else position[:, None].int()
        planes[POSITION] = place.expand(rows, heads if policy.per_head else 1, n)
        return planes

    def require(self, n: int) -> None:
        """Raise CapacityError if n more tokens exceed the layer's limit."""
        if self.policy.budget is None:
            slots = self.cursor.slots
            require_within(slots.limit, slots.length + n)

    def check_gradients(self, *tensors: Tensor) -> None:
        """Raise StateError if gradients are required that the storage or a codec does not
        propagate."""
        if wants_gradients(*tensors):
            parts: dict[str, Storage | Codec] = {
                "storage": self.cursor.slots.storage,
                "codec of keys": self.setup.codecs.key,
                "codec of values": self.setup.codecs.value,
            }
            for kind, part in parts.items():
                if not part.differentiable:
                    raise StateError(
                        f"this cache does not propagate gradients: its {kind} is {part.name!r}; "
                        "run the forward in torch.no_grad(), train with kvkeep.train, or end the "
                        "spec with +plain@concat"
                    )

    def phases(self, inputs: StepInputs, *, packs: bool = True) -> Phases:
        """A chunk, in one or more steps that pause for the caller to compute their attention. If it
        fails, or the generator is closed early, the chunk is undone. `packs`: free the empty slots
        of padding afterwards, if there are many."""
        cursor = self.cursor
        with cursor.turn:
            if cursor.state is not State.WRITING:  # `mend` needs `start` after an interrupt
                cursor.start = None
            try:
                self.checks.queries(
                    *(*inputs[:2], inputs.sinks, inputs.softcap, self.slopes, inputs.bias)
                )
                inputs = inputs.resolved()
                self.check_gradients(*inputs[:3])
                most = self.policy.step
                # A chunk is not divided if tokens see later tokens: both must be in one step.
                if most is None or inputs.q.shape[2] <= most or inputs.until is not None:
                    out = yield from phases(self, inputs)
                else:
                    out = yield from self._in_steps(inputs, most)
                if packs and not cursor.unread:
                    self._settler.pack()
            except BaseException:
                self._undo()
                raise
            return out

    def _undo(self) -> None:
        """Remove the tokens of a chunk that failed, unless slots were evicted or are moving."""
        cursor, start = self.cursor, self.cursor.start
        evicted = start is not None and cursor.history.floor != start[0].floor
        if start and not evicted and cursor.state is not State.MOVING:
            cursor.take_back()

    def _in_steps(self, inputs: StepInputs, most: int) -> Phases:
        """A chunk in steps of at most `most` tokens. If it fails after a step that cannot be
        undone, every later call raises until `reset`."""
        q, k, v, position = inputs[:4]
        cursor = self.cursor
        cursor.mend()
        self.checks.chunk(k, v, position, cursor.history.geometry)
        self.require(q.shape[2])
        position = (
            cursor.history.next_positions(q.shape[2], k.device) if position is None else position
        )
        inputs = inputs._replace(position=position.to(k.device))
        start, made = (cursor.history, cursor.slots.mark()), []
        try:
            for part in inputs.parts(most):
                made.append((yield from phases(self, part)))
        except BaseException:
            if made:
                cursor.start = start
                if not self.policy.rollback or cursor.history.floor != start[0].floor:
                    cursor.state = State.MOVING
            raise
        cursor.chunk = inputs.position
        return torch.cat(made, dim=2)
