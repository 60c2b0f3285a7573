"""LayerCache: the one place where storage, codec and policy meet."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from typing import final

import torch
from torch import Tensor

from kvkeep.attention import Attend, Held, View
from kvkeep.checks import Checks
from kvkeep.codec import Codec, WithinKeys, warn_about_keys
from kvkeep.errors import SpecError
from kvkeep.layer.cursor import Cursor, State, Turn
from kvkeep.layer.decode.plan import StepPlan
from kvkeep.layer.decode.ready import Ready
from kvkeep.layer.drafts import Drafts
from kvkeep.layer.frozen import Run
from kvkeep.layer.history import History, LayerState
from kvkeep.layer.new_slots import new_slots
from kvkeep.layer.sight import Sight, Sighted
from kvkeep.layer.slots import LayerSlots
from kvkeep.layer.stats import LayerStats, has_tail
from kvkeep.layer.step import Slopes, StepInputs, driven
from kvkeep.planes import LAST, Chunks, Planes, own_window, slot_count
from kvkeep.policy import Policy
from kvkeep.rotary import Rotary
from kvkeep.storage import Storage


@final
class LayerCache(Drafts):
    """One layer's KV cache: its slots, its history, and the step that extends, attends and evicts.

    Args:
        policy: chooses the slots to evict.
        key_codec, value_codec: encode and decode keys and values.
        storage: holds the slots; the layer takes ownership.
        window: the layer's own sliding window in tokens; None: no window.
        chunked: the window begins at a multiple of its size (chunked attention): a query at
            position p sees the positions from p // window * window on.
        rotary: the model's rotary embedding, for policies that need it; None: the model has none.
        readers: number of layers that attend to the slots after each step; see `Settling`.
        slopes: the slope of each query head (ALiBi): slope * (slot position - query position) is
            added to a slot's score; None: no bias.
        latent: the width of values in latent attention, where a value is the first elements of its
            key: slots hold both once, encoded by the codec of values; None: values are separate.

    Attributes:
        cursor: the slots, the history and the state of the current step.
        plans: make steps of one token by one call of the native library if it supports them;
            False: by extend, attend and settle, with the same result.

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
        slopes: Slopes | None = None,
        latent: int | None = None,
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
        self.window, self.rotary = own_window(window, chunked), rotary
        self.slopes = slopes
        sight = Sight(policy, self.window)
        evicts = policy.evicts or policy.ragged
        if evicts and not (key_codec.rewritable and value_codec.rewritable):
            raise SpecError(
                f"{sight.own_limit or f'policy {policy.name}'} evicts single slots, but codec "
                f"{key_codec.name}/{value_codec.name} encodes blocks of tokens; use int8 or "
                "int8/int4, or keep_all on layers without a sliding window"
            )
        if latent is None:
            warn_about_keys(key_codec)
        self.policy = policy = policy.in_layer(0, 1)
        value_codec = value_codec.for_values()
        if latent is not None:
            if value_codec != key_codec.for_values():
                raise SpecError(
                    f"codecs {key_codec.name}/{value_codec.name}: the values of a latent layer are "
                    f"elements of its keys, so both have one codec; use {value_codec.name}"
                )
            key_codec = key_codec.for_latents()
            value_codec = WithinKeys(key_codec, latent)
        self.key_codec, self.value_codec, self.latent = key_codec, value_codec, latent
        self.readers, self.sight = readers, sight._replace(policy=policy)
        self._planes_of_policy = tuple(policy.planes)
        slots = new_slots(
            key_codec,
            value_codec,
            storage,
            own=self._planes_of_policy,
            ragged=policy.ragged,
            budget=policy.most_slots or (0 if policy.evicts else None),
            tail=has_tail(policy, key_codec, value_codec),
        )
        self.cursor, self._checks = Cursor(slots), Checks()
        self.by_token = not _settles_alone(policy)
        self.plans = True
        self._plan: StepPlan | None = None
        self._turns = None

    # -- the step ---------------------------------------------------------------------------

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
        sees all slots that hold a token, including the whole chunk. For the other arguments see
        `extend` and `attend`.

        Invalid input, or a lack of memory for slots, raises before anything changes. If attention
        fails or is interrupted, or memory runs out while settling, the new tokens are removed;
        slots that no later query can reach may already be freed. If an eviction fails after it has
        changed slots, or a chunk of several steps fails after a step has evicted slots, every later
        call raises until `reset`.
        """
        if not causal:
            self.sight.require_no_order()
            until = torch.full(k.shape[2:3], LAST, dtype=torch.int32, device=k.device)
        return self.run(StepInputs(q, k, v, position, scale, softcap, sinks, until), attend)

    def run(self, inputs: StepInputs, attend: Attend | None = None) -> Tensor:
        """Like `step`, with the inputs as one record."""
        cursor = self.cursor
        with cursor.turn:
            single = attend is None and inputs.q.shape[2] == 1 and inputs.chosen is None
            if single and self._plan is not None and self.plans and not cursor.unread:
                made = self._plan.step(inputs)
                if made is not None:
                    if self.readers:
                        self.await_readings()
                    return made
            cursor.require_read()
            if cursor.state is not State.WRITING:  # `mend` needs `start` after an interrupt
                cursor.start = None
            if self._divides(inputs.q.shape[2]):
                return self._recorded(inputs, attend)
            # Attention weights refer to all columns, so packing must not move slots.
            out = driven(self._undone(inputs, packs=attend is None), attend)
            if single and self.plans:
                self._plan = StepPlan.of(self, inputs)
            return out

    def sighted(self, queries: Tensor) -> Sighted:
        """The keys among which the next tokens, at positions (1|B, n), choose."""
        return Sighted.of(self.held(), queries, self.sight)

    def next_plan(self) -> StepPlan | None:
        """The plan of the next decode step (one token a row); None: only `run` can make it."""
        plan = self._plan
        if plan is None or self.cursor.unread:
            return None
        return plan if plan.ready(self.cursor.turn.entries) else None

    def prepare(self) -> Ready | None:
        """Prepare the next decode step (one token a row); None: only `run` can make it."""
        plan = self.next_plan()
        return None if plan is None or plan.looks or self.readers else Ready(plan)

    @property
    def untouched(self) -> bool:
        """Whether the last call was a step that left room for one more token."""
        return self._plan is not None and self._plan.known and not self.cursor.unread

    # -- whole-state changes ----------------------------------------------------------------

    def reset(self) -> None:
        """Remove all tokens; the next tokens may have another geometry."""
        self.cursor.reset()
        self.cursor.turn, self._plan = Turn(), None

    def crop(self, tokens: int) -> None:
        """See `Drafts.crop`."""
        super().crop(tokens)
        if not self.fed:
            self._plan = None  # the slots' memory, to which it points, is freed

    def take_rows(self, index: Tensor) -> None:
        """Reorder, repeat or select rows: row i becomes a copy of row index[i]; int64 (B',)."""
        cursor = self.cursor
        if cursor.history.geometry is None:
            return
        self.accept()
        index = index.to(cursor.history.geometry.device)
        with cursor.turn, cursor.moved():
            cursor.slots = cursor.slots.take_rows(index)
            if cursor.chunk is not None and cursor.chunk.dim() == 2:
                cursor.chunk = cursor.chunk.index_select(0, index)
            cursor.history.take_rows(index)

    def mark_embedded(self, offset: Tensor | None = None, floor: int = 0) -> None:
        """Record that token ids do not identify the whole input: some tokens are images or sound,
        or were given as embeddings.

        Args:
            offset: the model's next rotary position minus `seen`, int64 (B,); None: 0.
            floor: the fewest columns that a crop may leave: with fewer, `offset` would be wrong.
        """
        history = self.cursor.history
        history.embedded, history.offset = True, offset
        history.floor = max(history.floor, floor)

    def state(self) -> LayerState:
        """The history and all slots; the planes are views, valid until the next change. All drafts
        become certain, as in every change of rows and every freeze."""
        self.accept()
        return LayerState(self.history, self.slots.parts())

    def require_room(self, state: LayerState) -> None:
        """Raise CapacityError when a state does not fit this layer's storage."""
        self.slots.require_room(slot_count(state.parts.get("slots", {})))

    def restore(self, state: LayerState) -> None:
        """Replace the contents by a copy of `state`, taken from a layer of the same kind."""
        cursor = self.cursor
        with cursor.turn:
            cursor.reset()
            cursor.state, self._plan = State.MOVING, None
            cursor.slots = cursor.slots.load(state.parts, state.history.rows)
            cursor.history = history = state.history.fork()
            if self.padded and history.floor and self._packs and cursor.pack():
                fresh = self.fed - history.floor
                if not cursor.slots.ends_with_tokens(fresh):
                    history.floor = self.fed
            cursor.state = State.IDLE

    def adopt_frozen(self, history: History, runs: Sequence[Run]) -> None:
        """Replace the contents by frozen slots, which other caches may share. New tokens go to a
        storage after them."""
        cursor = self.cursor
        with cursor.turn, cursor.moved():
            cursor.slots.adopt_frozen(runs, history)
            cursor.history, cursor.journal = history, []

    def adopt_planes(
        self, history: History, planes: Planes, length: int, empty: Tensor | None = None
    ) -> None:
        """Use `planes`, (B, H|1, limit, ...), as fixed storage, with the first `length` slots in
        use. Free the slots at the indices `empty`, int64 (B, H, E)."""
        cursor = self.cursor
        with cursor.turn, cursor.moved():
            cursor.slots.adopt_planes(planes, length, history.rows)
            cursor.history, cursor.journal = history, []
            cursor.forget_readings()
            if empty is not None:
                self.storage.evict(empty)

    def freeze(self) -> None:
        """Make the current slots immutable, so that forks share them."""
        self.accept()
        with self.cursor.turn, self.cursor.moved():
            self.slots.freeze()

    def fork(self) -> LayerCache:
        """A layer in the same state. Frozen slots are shared; all other slots are copied."""
        other = copy(self)
        other.cursor, other._checks, other._plan = self.cursor.fork(), Checks(), None
        return other

    @property
    def kind(self) -> str:
        """The policy, codecs and window as text; a state fits only layers of the same kind."""
        kind = f"{self.policy} {self.key_codec} {self.value_codec} window={self.window}"
        return f"{kind} chunked" if self.chunked else kind

    @property
    def chunked(self) -> bool:
        """Whether the layer's own window begins at a multiple of its size."""
        return isinstance(self.window, Chunks)

    # -- contents ---------------------------------------------------------------------------

    @property
    def slots(self) -> LayerSlots:
        """The layer's slots."""
        return self.cursor.slots

    @property
    def storage(self) -> Storage:
        """The storage of all slots that are not frozen."""
        return self.slots.storage

    @property
    def history(self) -> History:
        """A copy of the layer's history."""
        return self.cursor.history.fork()

    @property
    def seen(self) -> Tensor:
        """Tokens fed so far, int64 (B,), without padding; shape (0,) before the first token."""
        return self.cursor.history.seen

    @property
    def fed(self) -> int:
        """Columns fed so far, including padding."""
        return self.cursor.history.columns

    @property
    def padded(self) -> bool:
        """Whether any row has had padding."""
        return self.cursor.history.pads is not None

    @property
    def record_past(self) -> bool:
        """Whether the chunks fed may be drafts, which `crop` can remove. Can be set."""
        return self.cursor.record_past

    @record_past.setter
    def record_past(self, on: bool) -> None:
        self.cursor.record_past = on

    @property
    def evicted(self) -> list[Tensor] | None:
        """The positions that each eviction freed; see `ReplayPolicy`. None: not recorded. To record
        them, set it to a list."""
        return self.cursor.evicted

    @evicted.setter
    def evicted(self, decisions: list[Tensor] | None) -> None:
        self.cursor.evicted = decisions

    @property
    def offset(self) -> Tensor | None:
        """The model's next rotary position minus `seen`, int64 (B,); None: 0. It differs where
        tokens of images share positions."""
        return self.cursor.history.offset

    @property
    def tokens(self) -> Tensor | None:
        """Token ids of the first columns fed, (B, n), as far as they are known."""
        return self.cursor.history.tokens

    @tokens.setter
    def tokens(self, tokens: Tensor) -> None:
        self.cursor.history.tokens = tokens

    def positions(self) -> Tensor:
        """Positions of all slots, int32 (B, H, S), in slot order; -1 for an empty slot."""
        geometry = self.cursor.history.geometry
        return self.slots.positions().expand(-1, geometry.heads if geometry else 1, -1)

    def in_order(self, view: View) -> Held:
        """Keys and values of a view in ascending order of position, for attention functions with
        masks by column. They are copied if `moved`."""
        geometry = self.cursor.history.geometry
        assert geometry is not None
        return view.in_order(geometry.dtype, geometry.dtype, moved=self.moved, centre=self.centre)

    @property
    def moved(self) -> bool:
        """Whether slots may be out of the order of positions, now or after this step: after an
        eviction, if the layer holds more than its budget, or if it encodes tokens in blocks."""
        slots, history = self.slots, self.cursor.history
        budget = self.policy.at(history.columns).budget
        late = slots.block > 1 and slots.length > 0  # sinks lie behind encoded tokens
        return bool(history.floor) or late or slots.length > (budget or slots.length)

    def held(self) -> Held | None:
        """The decoded keys and values and their positions, the oldest first; None if the layer is
        empty. If no token was evicted, there is one slot for each column fed: freed padding, and
        slots that shorter heads lack, appear as empty slots in front.

        Valid until the next change. If nothing had to be decoded or moved, the tensors are views of
        the slots: do not write to them.
        """
        slots, history = self.slots, self.cursor.history
        if history.geometry is None or not slots.length:
            return None
        newest = torch.zeros(1, dtype=torch.int32, device=history.geometry.device)
        held = self.in_order(View(slots.segments(), newest))
        if held.position.shape[2] < history.columns and self.kept == 1:  # only padding was freed
            held = held.widened(history.columns)
        return held if slots.storage.lasting else Held(*(x.clone() for x in held[:3]))

    @property
    def keys(self) -> Tensor | None:
        """Keys of `held`, (B, H, S, Dk); the name that transformers uses."""
        held = self.held()
        return None if held is None else held.keys

    @property
    def values(self) -> Tensor | None:
        """Values of `held`, (B, H, S, Dv)."""
        held = self.held()
        return None if held is None else held.values

    # -- figures ----------------------------------------------------------------------------

    @property
    def length(self) -> int:
        """Slots in use, of the longest row or head; a padded row's empty slots count."""
        return self.slots.length

    @property
    def capacity(self) -> int:
        """Slots allocated."""
        return self.slots.capacity

    @property
    def limit(self) -> int | None:
        """The most slots the layer can hold; None: limited by memory only."""
        return self.slots.limit

    @property
    def live_bytes(self) -> int:
        """Bytes of the slots in use, in all planes."""
        return self.slots.stats().live_bytes

    @property
    def nbytes(self) -> int:
        """Bytes allocated. On the CPU, pages that were never written occupy no memory."""
        return self.slots.stats().nbytes

    @property
    def kept(self) -> float:
        """Share of the tokens fed that the layer holds, averaged over rows and heads; 1 before the
        first token."""
        seen, position = int(self.seen.sum()), self.slots.positions()
        return int((position >= 0).sum()) / (seen * position.shape[1]) if seen else 1.0

    def stats(self) -> LayerStats:
        """All figures at once."""
        return replace(self.slots.stats(), kept=self.kept)


def _settles_alone(policy: Policy) -> bool:
    """Whether a decode step under this policy changes only the new token's slot and slots that left
    the reach."""
    reach = policy.reach
    bounded = reach is not None and policy.budget == reach.size + reach.fixed
    looks_on = policy.observes or policy.needs or policy.planes
    return (not policy.evicts or bounded) and not looks_on
