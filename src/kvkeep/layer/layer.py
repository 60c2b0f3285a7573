"""LayerCache: the one place where storage, codec and policy meet."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import replace

import torch
from torch import Tensor

from kvkeep.attention import Attend, View
from kvkeep.checks import Checks, check_places, check_range, resolved, wants_gradients
from kvkeep.codec import Codec, caution
from kvkeep.errors import SpecError, StateError
from kvkeep.geometry import Geometry
from kvkeep.layer.beginning import runs_for
from kvkeep.layer.frozen import Run
from kvkeep.layer.hiding import Hiding
from kvkeep.layer.history import History, LayerState, Prompt
from kvkeep.layer.new_slots import new_slots
from kvkeep.layer.plan import StepPlan, settles_alone
from kvkeep.layer.readable import Readable
from kvkeep.layer.ready import Ready
from kvkeep.layer.settling import Settling
from kvkeep.layer.slots import LayerSlots
from kvkeep.layer.stats import LayerStats
from kvkeep.layer.step import Phases, StepInputs, driven
from kvkeep.layer.turn import Turn
from kvkeep.planes import LAST, POSITION, Planes, Reach, own_window, slot_count
from kvkeep.policy import Arrivals, Need, Policy
from kvkeep.rotary import Rotary
from kvkeep.storage import Storage


class LayerCache(Readable, Settling, Hiding):
    """One layer's KV cache: its slots, its history, and the step that extends, attends and evicts.

    Args:
        policy: chooses the slots to evict.
        key_codec, value_codec: encode and decode keys and values.
        storage: holds the slots; the layer takes ownership.
        window: the layer's own sliding window, if it has one.
        chunked: the window begins at a multiple of its size (chunked attention): a query at
            position p sees the positions from p // window * window on.
        rotary: the model's rotary embedding, for policies that need it; None: it has none.
        readers: how many layers attend to the slots after each step; see `ReadAgain`.

    Attributes:
        holes_after: an integer if padding behind a row's first token counts in positions, as it
            does in transformers' sliding windows: that among the first `holes_after` tokens does
            not. None: no padding counts.
        plans: whether the native library makes steps of one token in one call, where it can;
            otherwise extend, attend and settle do, with the same result.

    Raises:
        SpecError: the policy, codecs and storage cannot be combined.
    """

    def __init__(
        self,
        policy: Policy,
        key_codec: Codec,
        value_codec: Codec,
        storage: Storage,
        *,
        window: int | None = None,
        chunked: bool = False,
        rotary: Rotary | None = None,
        readers: int = 0,
    ) -> None:
        if (storage.limit or policy.budget or 0) < (policy.budget or 0):
            raise SpecError(
                f"policy {policy.name} keeps {policy.budget} slots, but {storage.name} storage "
                f"holds {storage.limit}; use @fixed:{policy.budget} or more"
            )
        if readers and policy.step is not None:
            raise SpecError(
                f"policy {policy.name} divides a chunk into steps of {policy.step}, but other "
                "layers attend to this layer's slots after each chunk; leave out step"
            )
        self.window = own_window(window, chunked)
        evicts = policy.evicts or policy.ragged
        if evicts and not (key_codec.rewritable and value_codec.rewritable):
            own = self.window if policy.reach == Reach(self.window or 0) else None
            who = own.words if own else f"policy {policy.name}"
            raise SpecError(
                f"{who} evicts single slots, but codec {key_codec.name}/{value_codec.name} encodes "
                "blocks of tokens; use int8 or int8/int4, or keep_all on layers without a sliding "
                "window"
            )
        caution(key_codec)
        self.policy = policy = policy.in_layer(0, 1)
        self.key_codec = key_codec
        self.value_codec = value_codec = value_codec.for_values()
        self.rotary = rotary
        self.readers, self.unread = readers, 0
        self.holes_after: int | None = None
        self.record_past, self.prompt, self._journal = False, Prompt(), []
        self.evicted = None
        self._planes_of_policy = tuple(policy.planes)
        self._slots = new_slots(
            key_codec,
            value_codec,
            storage,
            own=self._planes_of_policy,
            ragged=policy.ragged,
            budget=policy.budget + policy.room if policy.budget else 0 if policy.evicts else None,
        )
        self.past, self._checks = History(), Checks()
        self._chunk: Tensor | None = None  # positions of the last chunk
        self.turn = Turn()  # held by the thread that changes the layer
        # For `mend`: the state before the last chunk; whether it is being written, or slots moved.
        self._begun: tuple[History, tuple[int, ...]] | None = None
        self._writing = self._moving = False
        self._settles_alone = settles_alone(policy)
        self.by_token = not self._settles_alone
        self.plans = True
        self._plan: StepPlan | None = None

    # -- the step ---------------------------------------------------------------------------

    def extend(
        self, k: Tensor, v: Tensor, position: Tensor | None = None, until: Tensor | None = None
    ) -> View:
        """Write n new tokens and return the view that their queries attend to.

        Args:
            k, v: (B, H, n, Dk) and (B, H, n, Dv), of the same dtype and device, any strides; they
                are copied.
            position: the tokens' positions: (n,) if all rows have the same, or (B, n) with -1 for
                padding, or `HOLE` for padding that counts. None continues every row. A padding
                query sees the kept tokens before it in its row; slots beyond the policy's reach may
                already be gone. If the policy needs the mass, a padding query sees nothing.
            until: the newest position that each token's query sees, integers (n,) or (B, n), where
                tokens see later ones, such as those of one image; None, or less than its own: its
                own. What comes in a later call is not seen, and windows limit this as well.

        Returns:
            All kept slots and the new tokens; valid until the next change.

        Raises:
            ShapeError: the tensors do not fit each other or the tokens already held.
            CapacityError: there is no room for the tokens, and the policy evicts nothing.
            StateError: gradients are required but the storage writes in place; another thread is
                changing the layer; an eviction was interrupted; or there are several tokens while
                `record_past` is set, and the policy decides after each.
        """
        with self.turn:
            return self._extend(resolved(k), resolved(v), position, until)

    def _extend(
        self, k: Tensor, v: Tensor, position: Tensor | None, until: Tensor | None = None
    ) -> View:
        self.require_read()
        self._mend()
        self._checks.chunk(k, v, position, self.past.geometry)
        if until is not None:
            check_places("until", until, k.shape[0], k.shape[2])
            check_range("until", until)
        self.check_gradients(k, v)
        n = k.shape[2]
        self.require(n)
        if self.past.geometry is None:  # raises if a codec does not support the width
            self.key_codec.planes(k.shape[3], k.dtype)
            self.value_codec.planes(v.shape[3], v.dtype)
        position = self.next_positions(n, k.device) if position is None else position.to(k.device)
        # First free the slots that no later query can reach, so a sliding window reuses them.
        if self.policy.reach is not None:
            self._evict(self.length - self.reachable)
        self._note(n)
        own = self.own_planes(k, v, position)
        self._begun, self._writing = (self.past, self._slots.mark()), True
        try:
            self._slots.add(k, v, own)
            if self.past.geometry is None:
                self.past.geometry = Geometry.of(k, v)
            self._chunk = position
            self.past, queries = self.past.feed(
                position,
                k.shape[0],
                shows_padding=self.policy.shows_padding,
                holes=self.holes_after is not None,
            )
        except BaseException:
            self._take_back()
            raise
        self._writing = False
        if until is not None:
            until = torch.where(position < 0, -1, until.to(k.device)).to(torch.int32)
        self._queries = (queries, until) if self.readers else None
        return self._view(queries, until)

    def _view(self, queries: Tensor | None, until: Tensor | None) -> View:
        slots, history = self._slots, self.past
        if queries is None:
            assert history.geometry is not None
            queries = history.next_positions(1, history.geometry.device) - 1
        hides = slots.frozen.hides or slots.hidden > 0
        return self.view_of(slots.segments(), queries, history, slots.length, hides, until)

    def step(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        position: Tensor | None = None,
        *,
        scale: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        until: Tensor | None = None,
        causal: bool = True,
        attend: Attend | None = None,
    ) -> Tensor:
        """Extend, attend and settle: q (B, Hq, n, Dk) -> out (B, Hq, n, Dv).

        `attend` replaces the attention function; None uses `dispatch`. Unless `causal`, every query
        sees all slots that hold a token, those of the whole chunk included. The other arguments are
        those of `extend` and `attend`. What is invalid, and a lack of memory for slots, raises
        before anything is changed. If attention fails or is interrupted, or memory runs out while
        settling, the new tokens are removed; slots that no later query can reach may be gone. If an
        eviction fails after it has changed slots, or a chunk after one of several steps has, every
        later call raises until `reset`.
        """
        if not causal:
            self._require_no_order()
            until = torch.full(k.shape[2:3], LAST, dtype=torch.int32, device=k.device)
        return self.run(StepInputs(q, k, v, position, scale, softcap, sinks, until), attend)

    def run(self, inputs: StepInputs, attend: Attend | None = None) -> Tensor:
        """Like `step`, with the inputs as one record."""
        with self.turn:
            single = attend is None and inputs.q.shape[2] == 1
            if single and self._plan is not None and self.plans and not self.unread:
                made = self._plan.step(self, inputs)
                if made is not None:
                    if self.readers:
                        self._queries = None
                        self._await_readings()
                    return made
            self.require_read()
            if not self._writing:  # otherwise `mend` needs it
                self._begun = None
            if self._divides(inputs.q.shape[2]):
                return self._recorded(inputs, attend)
            # Where attention weights are wanted all slots stay: they refer to all columns.
            out = driven(self._undone(inputs, packs=attend is None), attend)
            if single and self.plans:
                self._plan = StepPlan.of(self, inputs)
            return out

    def next_plan(self) -> StepPlan | None:
        """The plan of the next step of one token a row; None: `run` must make it."""
        plan = self._plan
        if plan is None or self.unread:
            return None
        return plan if plan.ready(self, self.turn.entries) else None

    def prepare(self) -> Ready | None:
        """Prepare the next step of one token a row; None: `run` must make it."""
        plan = self.next_plan()
        return None if plan is None or plan.looks or self.readers else Ready(self, plan)

    @property
    def untouched(self) -> bool:
        """Whether nothing has happened since a step after which there is room for one token."""
        return self._plan is not None and self._plan.known(self) and not self.unread

    def phases(self, inputs: StepInputs) -> Phases:
        """A step like `run`, whose attention the caller computes. Closed early, it is undone."""
        with self.turn:
            self._begun = self._begun if self._writing else None
            return (yield from self._undone(inputs, packs=True))

    def _undone(self, inputs: StepInputs, *, packs: bool) -> Phases:
        """A step of any kind, which is undone if it fails."""
        try:
            self._checks.queries(inputs.q, inputs.k, inputs.sinks, inputs.softcap)
            inputs = inputs.resolved()
            self.check_gradients(*inputs[:3])
            most = self.policy.step
            # Tokens that see later ones are one step: those must be there.
            if most is None or inputs.q.shape[2] <= most or inputs.until is not None:
                out = yield from self._phases(inputs)
            else:
                out = yield from self._in_steps(inputs, most)
            if packs and not self.unread:
                self._pack()
        except BaseException:
            begun = self._begun
            if begun and not self._moving and self.past.floor == begun[0].floor:
                self._take_back()  # no eviction has followed
            raise
        return out

    def _in_steps(self, inputs: StepInputs, most: int) -> Phases:
        """A chunk, in steps of at most `most` tokens. If it fails after one of them has changed
        what cannot be undone, every later call raises until `reset`."""
        q, k, v, position = inputs[:4]
        self._mend()
        self._checks.chunk(k, v, position, self.past.geometry)
        self.require(q.shape[2])
        position = self.next_positions(q.shape[2], k.device) if position is None else position
        inputs = inputs._replace(position=position.to(k.device))
        begun, made = (self.past, self._slots.mark()), []
        try:
            for part in inputs.parts(most):
                made.append((yield from self._phases(part)))
        except BaseException:
            if made:
                self._begun = begun
                self._moving |= not self.policy.rollback or self.past.floor != begun[0].floor
            raise
        self._chunk = inputs.position
        return torch.cat(made, dim=2)

    def mend(self) -> None:
        """Remove the tokens that an interrupted step wrote, if there was one.

        Raises:
            StateError: the step was interrupted while slots were moved, so their contents are
                unknown; or nothing was evicted, but the number of slots and the number of columns
                fed differ.
        """
        with self.turn:
            self._mend()

    def _mend(self) -> None:
        if self._moving:
            raise StateError(
                "an eviction, another change of all slots, or a chunk after some of its steps was "
                "interrupted or failed, so the contents of the slots are unknown; reset() the "
                "cache and feed the tokens again, or restore a snapshot"
            )
        if self._writing:
            self._take_back()
        history = self.past
        if not history.floor and not history.joined and self.length != history.columns:
            raise StateError(
                f"the layer holds {self.length} slots, but {history.columns} tokens were fed and "
                "none were evicted; something else changed its slots: reset() the cache and feed "
                "the tokens again"
            )

    def next_positions(self, n: int, device: torch.device, real: Tensor | None = None) -> Tensor:
        """See `History.next_positions`."""
        return self.past.next_positions(n, device, real, self.holes_after)

    # -- whole-state changes ----------------------------------------------------------------

    def reset(self) -> None:
        """Remove all tokens; those fed next may have another geometry."""
        self._forget()
        self.turn = Turn()

    def _forget(self) -> None:
        self._writing, self._moving = False, True
        self._forget_readings()
        self._slots = self._slots.reset()
        self.past, self._chunk, self._begun, self._journal = History(), None, None, []
        self._forget_plan()
        self.holes_after = None if self.holes_after is None else 0
        self._moving = False

    def _forget_plan(self) -> None:
        self._plan = None

    def take_rows(self, index: Tensor) -> None:
        """Reorder, repeat or select rows: row i becomes a copy of row index[i]; int64 (B',)."""
        if self.past.geometry is None:
            return
        self._accept()
        index = index.to(self.past.geometry.device)
        with self.turn, self._moved():
            self._slots = self._slots.take_rows(index)
            if self._chunk is not None and self._chunk.dim() == 2:
                self._chunk = self._chunk.index_select(0, index)
            self.past.take_rows(index)

    @property
    def history(self) -> History:
        """A copy of the record of what was fed."""
        return self.past.fork()

    @property
    def interrupted(self) -> bool:
        """Whether a step or another change was begun and has not ended."""
        return self._writing or self._moving

    @property
    def offset(self) -> Tensor | None:
        """By how much the model's next rotary position exceeds `seen`, int64 (B,); None: by
        nothing. See `mark_embedded`."""
        return self.past.offset

    def mark_embedded(self, offset: Tensor | None = None, floor: int = 0) -> None:
        """Record that token ids do not tell all that was fed: some tokens were those of images or
        sound, or came as embeddings.

        Args:
            offset: see the attribute of that name.
            floor: a crop must leave that many columns, because `offset` does not hold before.
        """
        self.past.embedded, self.past.offset = True, offset
        self.past.floor = max(self.past.floor, floor)

    @property
    def tokens(self) -> Tensor | None:
        """The token ids of the first columns fed, (B, n), as far as they are known."""
        return self.past.tokens

    @tokens.setter
    def tokens(self, tokens: Tensor) -> None:
        self.past.tokens = tokens

    def state(self) -> LayerState:
        """The history and all slots; the planes are views, valid until the next change. Drafts that
        were not taken back are certain from now on; likewise in all changes of rows and freezes."""
        self._accept()
        return LayerState(self.history, self._slots.parts())

    def require_room(self, state: LayerState) -> None:
        """Raise CapacityError when a state does not fit this layer's storage."""
        self._slots.require_room(slot_count(state.parts.get("slots", {})))

    def restore(self, state: LayerState) -> None:
        """Replace the contents by a copy of `state`, which a layer of the same kind returned."""
        with self.turn:
            self._forget()
            self._moving = True
            self._slots = self._slots.load(state.parts, state.history.rows)
            self.past = state.history.fork()
            if self.padded and self.past.floor and self._packs and self._packed():
                fresh = self.fed - self.past.floor
                if not self._slots.ends_with_tokens(fresh):
                    self.past.floor = self.fed
            self._moving = False

    def adopt_frozen(self, history: History, runs: Sequence[Run]) -> None:
        """Replace the contents by frozen slots, which other caches may share. New tokens are
        written to a storage that follows them."""
        with self.turn, self._moved():
            self._slots.adopt_frozen(runs, history)
            self.past, self._journal = history, []

    def begin_with(self, text: LayerCache) -> None:
        """Replace the contents by the tokens of a layer that keeps all, as if they had been fed in
        one chunk that is not settled yet: the next chunk sees all of them, and the policy chooses
        among all. Their slots are shared where that is possible, until the policy evicts."""
        self.adopt_frozen(text.history, tuple(runs_for(self, text)))

    def adopt_planes(
        self, history: History, planes: Planes, length: int, empty: Tensor | None = None
    ) -> None:
        """Use these planes, (B, H|1, limit, ...), as fixed storage, with the first `length` slots
        in use. The slots at the indices `empty`, int64 (B, H, E), are freed."""
        with self.turn, self._moved():
            self._slots.adopt_planes(planes, length, history.rows)
            self.past, self._journal = history, []
            if empty is not None:
                self.storage.evict(empty)

    def freeze(self) -> None:
        """Make the current slots immutable, so that forks share them."""
        self._accept()
        with self.turn, self._moved():
            self._slots.freeze()

    def fork(self) -> LayerCache:
        """A layer in the same state, which shares the frozen slots and copies the others."""
        other = copy(self)
        other._slots, other.past = self._slots.fork(), self.past.fork()
        other._checks, other.evicted, other.turn = Checks(), None, Turn()
        other._journal = [*self._journal]
        other._plan = None
        return other

    @property
    def kind(self) -> str:
        """The policy, codecs and window as text; states fit only layers of the same kind."""
        kind = f"{self.policy} {self.key_codec} {self.value_codec} window={self.window}"
        return f"{kind} chunked" if self.chunked else kind

    # -- figures ----------------------------------------------------------------------------

    @property
    def length(self) -> int:
        """Slots in use, a padded row's empty ones included; of the longest row or head."""
        return self._slots.length

    @property
    def capacity(self) -> int:
        """Slots allocated."""
        return self._slots.capacity

    @property
    def seen(self) -> Tensor:
        """Tokens fed so far, int64 (B,), without padding; shape (0,) before the first."""
        return self.past.seen

    @property
    def fed(self) -> int:
        """Columns fed so far, including padding."""
        return self.past.columns

    @property
    def padded(self) -> bool:
        """Whether any row has had padding."""
        return self.past.pads is not None

    @property
    def slots(self) -> LayerSlots:
        """What holds the slots."""
        return self._slots

    @property
    def storage(self) -> Storage:
        """The storage of the slots that are not frozen."""
        return self._slots.storage

    @property
    def limit(self) -> int | None:
        """The most slots the layer can hold; None: limited by memory only."""
        return self._slots.limit

    def positions(self) -> Tensor:
        """Positions of all slots, int32 (B, H, S), in slot order; -1 for an empty slot."""
        geometry = self.past.geometry
        return self._slots.positions().expand(-1, geometry.heads if geometry else 1, -1)

    @property
    def live_bytes(self) -> int:
        """Bytes of the slots in use, in all planes."""
        return self._slots.live_bytes

    @property
    def nbytes(self) -> int:
        """Bytes allocated; on the CPU, bytes that were never written take no memory."""
        return self._slots.nbytes

    def stats(self) -> LayerStats:
        """All figures at once."""
        return replace(self._slots.stats(), kept=self.kept)

    # -- inside -----------------------------------------------------------------------------

    def require(self, n: int) -> None:
        """Raise CapacityError when n more tokens exceed what the layer can ever hold."""
        if self.policy.budget is None:
            self._slots.require(n)

    def check_gradients(self, *tensors: Tensor) -> None:
        """Raise StateError if gradients are required that storage or a codec cannot propagate."""
        if wants_gradients(*tensors):
            parts: dict[str, Storage | Codec] = {
                "storage": self.storage,
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

    def own_planes(self, k: Tensor, v: Tensor, position: Tensor) -> dict[str, Tensor]:
        """The planes of new tokens other than keys and values."""
        policy, (rows, heads, n, _) = self.policy, k.shape
        planes: dict[str, Tensor] = {}
        if self._planes_of_policy:
            error = self._slots.errors(k, v) if Need.ENCODE_ERROR in policy.needs else None
            planes |= policy.enter(Arrivals(k.detach(), v.detach(), position, error, self.rotary))
        place = position.to(torch.int32) if position.dim() == 1 else position[:, None].int()
        planes[POSITION] = place.expand(rows, heads if policy.per_head else 1, n)
        return planes

    def _take_back(self) -> None:
        """Truncate to the state in `_begun`, if no eviction has followed it. An interrupted call
        can be repeated."""
        assert self._begun is not None
        self._writing = True
        self._forget_readings()
        before, mark = self._begun
        self._slots.cut(mark)
        self.past = before
        if not before.columns:
            self.reset()
        self._writing = False
