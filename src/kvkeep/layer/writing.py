"""Writing: a layer that divides a chunk into steps and undoes a failed step."""

from __future__ import annotations

import torch
from torch import Tensor

from kvkeep.attention import Centre, View
from kvkeep.attention.centre import measured
from kvkeep.checks import check_places, check_range, resolved
from kvkeep.errors import StateError
from kvkeep.geometry import Geometry
from kvkeep.layer.cursor import State
from kvkeep.layer.settling import Settling
from kvkeep.layer.step import Phases, Step, StepInputs
from kvkeep.planes import POSITION
from kvkeep.policy import Arrivals, Need


class Writing(Settling, Step):
    """A layer that writes new tokens. `decode.plan` makes single-token steps in one call."""

    def extend(
        self, k: Tensor, v: Tensor, position: Tensor | None = None, until: Tensor | None = None
    ) -> View:
        """Write n new tokens and return the view that their queries attend to.

        Args:
            k, v: (B, H, n, Dk) and (B, H, n, Dv), of the same dtype and device, any strides; they
                are copied.
            position: positions of the tokens: (n,) if all rows have the same, or (B, n), with -1
                for padding and `HOLE` for padding that counts. None continues every row. A padding
                query sees the kept tokens before it in its row; slots beyond the policy's reach may
                already be freed. If the policy needs the mass, a padding query sees nothing.
            until: the newest position that each query sees, integers (n,) or (B, n), if some tokens
                see later tokens, as within an image. None, or a value below a query's own position:
                the query's own position. Only tokens of this call are seen, and windows still
                apply.

        Returns:
            All kept slots and the new tokens; valid until the next change.

        Raises:
            ShapeError: the tensors do not fit each other or the tokens already held.
            CapacityError: there is no room for the tokens, and the policy evicts nothing.
            StateError: gradients are required, but the storage or a codec does not propagate them;
                another thread is changing the layer; an eviction was interrupted; or `record_past`
                is set, n > 1, and the policy decides after each token.
        """
        with self.cursor.turn:
            return self._extend(resolved(k), resolved(v), position, until)

    def _extend(
        self, k: Tensor, v: Tensor, position: Tensor | None, until: Tensor | None = None
    ) -> View:
        cursor = self.cursor
        cursor.require_read()
        cursor.mend()
        self._checks.chunk(k, v, position, cursor.history.geometry)
        if until is not None:
            check_places("until", until, k.shape[0], k.shape[2])
            check_range("until", until)
        self.check_gradients(k, v)
        n = k.shape[2]
        self.require(n)
        if cursor.history.geometry is None:  # raises if a codec does not support the width
            self.key_codec.planes(k.shape[3], k.dtype)
            self.value_codec.planes(v.shape[3], v.dtype)
        position = self.next_positions(n, k.device) if position is None else position.to(k.device)
        # First free the slots that no later query can reach, so that a sliding window reuses them.
        if self.policy.reach is not None:
            with cursor.moved():
                self._evict(cursor.slots.length - self.sight.reachable(cursor))
        self._note(n)
        centre = self.centre_for(k, position, cursor.history.centre)
        coded = k if centre is None else centre.without(k, position)
        own = self.own_planes(k, v, position, coded)
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
            cursor.history.centre = None if centre is None else centre.mean
        except BaseException:
            cursor.take_back()
            raise
        cursor.state = State.IDLE
        if until is not None:
            until = torch.where(position < 0, -1, until.to(k.device)).to(torch.int32)
        cursor.queries = (queries, until) if self.readers else None
        return self._view(queries, until)

    def _note(self, n: int) -> None:
        """Record the state before n tokens, if they are drafts.

        Raises:
            StateError: the policy requires drafts one by one.
        """
        cursor = self.cursor
        drafts = cursor.record_past and cursor.history.columns + n > cursor.prompt.columns
        if not drafts or not self._journaled:
            return
        if self.by_token and n > 1:
            remedy = "" if self.readers else "use step(), or "
            raise StateError(
                f"{n} tokens are given at once while record_past is set, but policy "
                f"{self.policy.name} decides after each token; {remedy}give one token at a time"
            )
        cursor.note(self._planes_of_policy)

    def centre_for(self, k: Tensor, position: Tensor, mean: Tensor | None = None) -> Centre | None:
        """The centre for encoding keys (B, H, n, Dk) at `position`, (n,) or (B, n); None: the codec
        uses no centre.

        Args:
            mean: the mean of the layer's centre; None: the layer has none yet, so it is measured on
                these keys.
        """
        tokens, positions = self.key_codec.centre, self.cursor.history.columns + k.shape[2]
        if not tokens:
            return None
        if position.device.type == "cpu":
            positions = max(positions, int(position.max()) + 1)
        turns = self.turns_for(k, positions)
        return Centre(measured(k, position, tokens, turns) if mean is None else mean, turns)

    def own_planes(
        self, k: Tensor, v: Tensor, position: Tensor, coded: Tensor | None = None
    ) -> dict[str, Tensor]:
        """The planes of new tokens other than keys and values. `coded`: the keys to encode, less
        their centre; None: `k`."""
        policy, slots, (rows, heads, n, _) = self.policy, self.cursor.slots, k.shape
        planes: dict[str, Tensor] = {}
        if self._planes_of_policy:
            error = (
                slots.errors(k if coded is None else coded, v)
                if Need.ENCODE_ERROR in policy.needs
                else None
            )
            planes |= policy.enter(Arrivals(k.detach(), v.detach(), position, error, self.rotary))
        place = position.to(torch.int32) if position.dim() == 1 else position[:, None].int()
        planes[POSITION] = place.expand(rows, heads if policy.per_head else 1, n)
        return planes

    def require(self, n: int) -> None:
        """Raise CapacityError if n more tokens exceed the layer's limit."""
        if self.policy.budget is None:
            self.cursor.slots.require(n)

    def next_positions(self, n: int, device: torch.device, real: Tensor | None = None) -> Tensor:
        """See `History.next_positions`."""
        cursor = self.cursor
        return cursor.history.next_positions(n, device, real, cursor.holes_after)

    def phases(self, inputs: StepInputs) -> Phases:
        """Like `run`, but the caller computes the attention. Closing the generator early undoes the
        step."""
        with self.cursor.turn:
            if self.cursor.state is not State.WRITING:
                self.cursor.start = None
            return (yield from self._undone(inputs, packs=True))

    def _undone(self, inputs: StepInputs, *, packs: bool) -> Phases:
        """A chunk, in one or more steps; undone if it fails."""
        cursor = self.cursor
        try:
            self._checks.queries(*inputs[:2], inputs.sinks, inputs.softcap, self.slopes)
            inputs = inputs.resolved()
            self.check_gradients(*inputs[:3])
            most = self.policy.step
            # A chunk is not divided if tokens see later tokens: both must be in the same step.
            if most is None or inputs.q.shape[2] <= most or inputs.until is not None:
                out = yield from self._phases(inputs)
            else:
                out = yield from self._in_steps(inputs, most)
            if packs and not cursor.unread:
                self._pack()
        except BaseException:
            start = cursor.start
            evicted = start is not None and cursor.history.floor != start[0].floor
            if start and not evicted and cursor.state is not State.MOVING:
                cursor.take_back()
            raise
        return out

    def _in_steps(self, inputs: StepInputs, most: int) -> Phases:
        """A chunk in steps of at most `most` tokens. If it fails after a step that cannot be
        undone, every later call raises until `reset`."""
        q, k, v, position = inputs[:4]
        cursor = self.cursor
        cursor.mend()
        self._checks.chunk(k, v, position, cursor.history.geometry)
        self.require(q.shape[2])
        position = self.next_positions(q.shape[2], k.device) if position is None else position
        inputs = inputs._replace(position=position.to(k.device))
        start, made = (cursor.history, cursor.slots.mark()), []
        try:
            for part in inputs.parts(most):
                made.append((yield from self._phases(part)))
        except BaseException:
            if made:
                cursor.start = start
                if not self.policy.rollback or cursor.history.floor != start[0].floor:
                    cursor.state = State.MOVING
            raise
        cursor.chunk = inputs.position
        return torch.cat(made, dim=2)
