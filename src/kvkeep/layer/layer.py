"""LayerCache: the one place where storage, codec and policy meet."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from operator import attrgetter
from typing import Any, Generic, TypeVar, Unpack, final

import torch
from torch import Tensor

from kvkeep.arguments import suggests
from kvkeep.attention import Attend, Held, View
from kvkeep.checks import resolved
from kvkeep.codec import Codec, warn_about_keys
from kvkeep.errors import SpecError
from kvkeep.layer.centring import Centring
from kvkeep.layer.contents import Contents
from kvkeep.layer.cursor import Cursor, Turn
from kvkeep.layer.decode.plan import StepPlan
from kvkeep.layer.decode.ready import Ready
from kvkeep.layer.drafts import Drafts
from kvkeep.layer.history import History, LayerState
from kvkeep.layer.settling import Settler
from kvkeep.layer.setup import LayerOptions, ModelLayer, Setup
from kvkeep.layer.sight import Sighted
from kvkeep.layer.slots import LayerSlots
from kvkeep.layer.stats import LayerStats
from kvkeep.layer.step import StepInputs, driven
from kvkeep.layer.writing import Writer
from kvkeep.planes import LAST, Chunks
from kvkeep.policy import Observation, Policy
from kvkeep.renamed import Renamed
from kvkeep.storage import Storage

Value = TypeVar("Value")


class OfPart(Generic[Value]):
    """A member of a part: it is read and set there.

    Args:
        path: the names that lead to it, such as `cursor.evicted`.
    """

    def __init__(self, path: str) -> None:
        self._part, _, self._name = path.rpartition(".")

    def __get__(self, instance: Any, owner: type) -> Value:
        value: Value = getattr(attrgetter(self._part)(instance), self._name)
        return value

    def __set__(self, instance: Any, value: Value) -> None:
        setattr(attrgetter(self._part)(instance), self._name, value)


@final
class LayerCache:
    """One layer's KV cache: its slots, its history, and the step that extends, attends and evicts.

    Each part does one thing and knows only the parts above it: `cursor` is everything that changes,
    `settler` lets the policy observe and evict, `writer` makes steps and reads the slots for other
    layers, `drafts` removes the newest tokens, `contents` decodes the slots, and `plan` makes a
    step of one token by one native call.

    Args:
        policy: chooses the slots to evict.
        key_codec, value_codec: encode and decode keys and values.
        storage: holds the slots; the layer takes ownership.
        window: the layer's own sliding window in tokens; None: no window.
        chunked: the window begins at a multiple of its size (chunked attention): a query at
            position p sees the positions from p // window * window on.
        rotary: the model's rotary embedding, for policies that need it; None: the model has none.
        readers: number of layers that attend to the slots after each step; see `read`.
        slopes: the slope of each query head (ALiBi): slope * (slot position - query position) is
            added to a slot's score; None: no bias.
        latent: the width of values in latent attention, where a value is the first elements of its
            key: slots hold both once, encoded by the codec of values; None: values are separate.

    Attributes:
        setup: the policy, codecs and limits, which never change.
        kind: the policy, codecs and window as text; a state fits only layers of the same kind.
        cursor: the slots, the history and the state of the current step.
        plans: make steps of one token by one call of the native library if it supports them;
            False: by extend, attend and settle, with the same result.
        plan: the native steps of one token; None: the last step was no such step.

    Raises:
        SpecError: the policy, codecs and storage cannot be combined.
    """

    @suggests(options=LayerOptions)
    def __init__(
        self,
        policy: Policy,
        key_codec: Codec,
        value_codec: Codec,
        storage: Storage,
        *,
        window: int | None = None,
        **options: Unpack[LayerOptions],
    ) -> None:
        model = ModelLayer.of(window, **options)
        if model.readers and policy.step is not None:
            raise SpecError(
                f"policy {policy.name} divides a chunk into steps of {policy.step}, but other "
                "layers attend to this layer's slots after each chunk; leave out step"
            )
        if model.latent is None:
            warn_about_keys(key_codec)
        self.window, self.rotary, readers, self.slopes, self.latent = model
        self.chunked = isinstance(self.window, Chunks)
        self.setup = setup = Setup(policy, key_codec, value_codec, model)
        self.policy, self.codecs, self.sight = setup.policy, setup.codecs, setup.sight
        (self.key_codec, self.value_codec), self.kind = setup.codecs, setup.kind
        self.centring, self.plans = Centring(self.key_codec, self.rotary), True
        self._hold(Cursor(setup.slots(storage), readers))

    def _hold(self, cursor: Cursor) -> None:
        """Make the parts that change what `cursor` holds."""
        setup, centring = self.setup, self.centring
        self.cursor = cursor
        self.plan: StepPlan | None = None
        self.settler = Settler(setup, cursor, centring)
        self.writer = Writer(setup, cursor, centring, self.settler)
        self.drafts = Drafts(setup, cursor, self.settler, self.writer)
        self.contents = Contents(setup.policy, cursor, centring)

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
        cursor, n = self.cursor, inputs.q.shape[2]
        with cursor.turn:
            single = attend is None and n == 1 and inputs.chosen is None
            if single and self.plan is not None and self.plans and not cursor.unread:
                made = self.plan.step(inputs)
                if made is not None:
                    return made
            cursor.require_read()
            if self.drafts.divides(n):
                return self.drafts.run(inputs, attend)
            # Attention weights refer to all columns, so packing must not move slots.
            out = driven(self.writer.phases(inputs, packs=attend is None), attend)
            if single and self.plans and not (self.plan and self.plan.serves(inputs)):
                self.plan = StepPlan.of(self.writer, inputs)
            return out

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
            return self.writer.extend(resolved(k), resolved(v), position, until)

    def settle(self, observation: Observation | None = None, *, packs: bool = True) -> None:
        """Pass the observation to the policy, then evict down to its budget. Without an observation
        the policy evicts by earlier ones. While `record_past` is set, no slot is freed, so that the
        next `crop` can remove tokens."""
        with self.cursor.turn:
            self.settler.settle(observation, packs=packs)

    def read(self, inputs: StepInputs, attend: Attend | None = None) -> Tensor:
        """Attend, as a layer without slots, to the slots of the last step; see `Writer`. Nothing
        is written.

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
        return self.writer.read(inputs, attend)

    def next_positions(self, n: int, device: torch.device, real: Tensor | None = None) -> Tensor:
        """See `History.next_positions`."""
        history, after = self.cursor.history, self.cursor.holes_after
        return history.next_positions(n, device, real, after)

    def sighted(self, queries: Tensor) -> Sighted:
        """The keys among which the next tokens, at positions (1|B, n), choose."""
        return Sighted.of(self.contents.held(), queries, self.sight)

    def prepare(self) -> Ready | None:
        """Prepare the next decode step (one token a row); None: only `run` can make it."""
        plan = self.plan
        if plan is None or plan.looks or self.cursor.readers or not plan.ready():
            return None
        return Ready(plan)

    # -- whole-state changes ----------------------------------------------------------------

    def reset(self) -> None:
        """Remove all tokens; the next tokens may have another geometry."""
        self.cursor.reset()
        self.cursor.turn, self.plan = Turn(), None

    def crop(self, tokens: int) -> None:
        """Remove the newest -`tokens` columns (tokens <= 0) of every row, padding included. The
        remaining tokens are no longer drafts: hidden slots are freed, and the policy evicts down to
        its budget.

        Raises:
            RollbackError: `tokens` is positive, or -`tokens` exceeds `rollback_limit`.
        """
        self.drafts.crop(tokens)
        if not self.fed:
            self.plan = None  # the slots' memory, to which it points, is freed

    def take_rows(self, index: Tensor) -> None:
        """Reorder, repeat or select rows: row i becomes a copy of row index[i]; int64 (B',)."""
        self.settler.accept()
        self.cursor.take_rows(index)

    def state(self) -> LayerState:
        """The history and all slots; the planes are views, valid until the next change. All drafts
        become certain, as in every change of rows and every freeze."""
        self.settler.accept()
        return LayerState(self.history, self.slots.parts())

    def restore(self, state: LayerState) -> None:
        """Replace the contents by a copy of `state`, taken from a layer of the same kind."""
        with self.cursor.turn:
            self.plan = None
            self.cursor.restore(state, packs=self.settler.packs)

    def freeze(self) -> None:
        """Make the current slots immutable, so that forks share them."""
        self.settler.accept()
        with self.cursor.turn, self.cursor.moved():
            self.slots.freeze()

    def fork(self) -> LayerCache:
        """A layer in the same state. Frozen slots are shared; all other slots are copied."""
        other = copy(self)
        other._hold(self.cursor.fork())
        return other

    # -- contents ---------------------------------------------------------------------------

    @property
    def slots(self) -> LayerSlots:
        """The layer's slots."""
        return self.cursor.slots

    @property
    def history(self) -> History:
        """A copy of the layer's history."""
        return self.cursor.history.fork()

    @property
    def fed(self) -> int:
        """Columns fed so far, including padding."""
        return self.cursor.history.columns

    @property
    def padded(self) -> bool:
        """Whether any row has had padding."""
        return self.cursor.history.pads is not None

    def positions(self) -> Tensor:
        """Positions of all slots, int32 (B, H, S), in slot order; -1 for an empty slot."""
        geometry = self.cursor.history.geometry
        return self.slots.positions().expand(-1, geometry.heads if geometry else 1, -1)

    def held(self) -> Held | None:
        """The decoded keys and values and their positions, the oldest first; None if the layer is
        empty. If no token was evicted, there is one slot for each column fed: freed padding, and
        slots that shorter heads lack, appear as empty slots in front.

        Valid until the next change. If nothing had to be decoded or moved, the tensors are views of
        the slots: do not write to them.
        """
        return self.contents.held()

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

    def stats(self) -> LayerStats:
        """All figures at once."""
        return replace(self.slots.stats, kept=self.contents.kept)

    # -- members of the parts ---------------------------------------------------------------

    rollback_limit = OfPart[int]("drafts.rollback_limit")
    """Number of newest tokens that `crop` can remove exactly."""
    record_past = OfPart[bool]("cursor.record_past")
    """Whether the chunks fed may be drafts, which `crop` can remove. Can be set."""
    seen = OfPart[Tensor]("cursor.history.seen")
    """Tokens fed so far, int64 (B,), without padding; shape (0,) before the first token."""
    storage = OfPart[Storage]("slots.storage")
    """The storage of all slots that are not frozen."""
    length = OfPart[int]("slots.length")
    """Slots in use, of the longest row or head; a padded row's empty slots count."""

    mend = Renamed("layer.cursor.mend")
    unread = Renamed("layer.cursor.unread")
    evicted = Renamed("layer.cursor.evicted")
    tokens = Renamed("layer.cursor.history.tokens")
    offset = Renamed("layer.cursor.history.offset")
    in_order = Renamed("layer.contents.in_order")
    kept = Renamed("layer.stats().kept")
    limit = Renamed("layer.slots.limit")
    capacity = Renamed("layer.stats().capacity")
    live_bytes = Renamed("layer.stats().live_bytes")
    nbytes = Renamed("layer.stats().nbytes")
