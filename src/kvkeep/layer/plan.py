"""StepPlan: a layer's step of one token a row, made by one call of the native library.

In Python the parts of a step (checks, writing, describing the slots, attention, the policy) take
longer than attention over a few hundred slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvkeep.checks import wants_gradients
from kvkeep.layer.history import History
from kvkeep.layer.records import SEQUENCE, TOKENS, LayerRecords, PartRecords, possible
from kvkeep.layer.slots import StepPart
from kvkeep.layer.step import StepInputs
from kvkeep.native_library import LIBRARY
from kvkeep.planes import hides_chunks, limits
from kvkeep.policy import Arrivals, Policy
from kvkeep.policy.rule import Enter, Learn, Rule, rule_of
from kvkeep.storage import Storage

if TYPE_CHECKING:
    from kvkeep.layer.layer import LayerCache

FAILED, UNLIKE = 1, 2  # KvStepResult
BEGUN, RUNNING, DONE = range(3)  # of a step that waits to be made


def settles_alone(policy: Policy) -> bool:
    """Whether a decode step under this policy changes no slots but its own and those that the reach
    has passed."""
    reach = policy.reach
    bounded = reach is not None and policy.budget == reach.size + reach.fixed
    looks_on = policy.observes or policy.needs or policy.planes
    return (not policy.evicts or bounded) and not looks_on


class StepPlan:
    """The steps of one token a row of one layer, packed once and made many times.

    A plan knows what the next step does, as long as nobody else takes the layer's turn; `find`
    looks it up. It is the only code beside `LayerCache` that moves a layer's cursor.

    Attributes:
        kind: see `kind_of`: inputs of this kind fit.
    """

    column: int
    """The column of the next token."""
    drops: int
    """1: the next step frees a slot that its query cannot reach before the token is written."""
    evicts: int
    """How many slots it frees afterwards; where heads compete, of all of them together."""

    def __init__(
        self, layer: LayerCache, inputs: StepInputs, rule: Rule, parts: Sequence[StepPart]
    ) -> None:
        history, policy, slots = layer.history_now, layer.policy, layer.slots
        assert history.geometry is not None  # `of`
        rows = inputs.k.shape[0]
        self._left = torch.zeros(len(parts), dtype=torch.int64)
        records = LayerRecords(
            *(policy, rule, slots.codecs, history.geometry.value_width),
            *(layer.window, layer.chunked, history.pads, self._left),
        )
        self.parts: list[PartRecords] = [
            records.of(index, part, inputs) for index, part in enumerate(parts)
        ]
        self._storages: list[Storage] = list(dict.fromkeys(part.storage for part in parts))
        self._before = sum(segment.slots for segment in parts[0].before)
        self._slots, self._state = slots, slots.step_state()
        self._geometry, self._pads, self._rule = history.geometry, history.pads, rule
        self._given = Enter.GIVEN in rule.enter.values()
        self._frees = policy.evicts or policy.reach is not None
        # Where every step is like the last, nothing has to be looked up.
        self._follows = not (self._frees or slots.block > 1)
        self._threads = torch.get_num_threads()
        self._turn, self._entries = layer.turn, -1
        self._begun: tuple[History, tuple[int, ...]] | None = None
        self.kind, self._exactly = kind_of(inputs), _exactly(inputs)
        self.out_shape = (rows, inputs.q.shape[1], 1, history.geometry.value_width)
        self._strides = _strides(inputs, self.out_shape)
        self.column = self.drops = self.evicts = self._recent = 0
        self._lengths: list[int] = []
        self._dense = True
        self._first: Tensor | None = None  # what the policy gives for the new token

    @classmethod
    def of(cls, layer: LayerCache, inputs: StepInputs) -> StepPlan | None:
        """The plan of steps like the one just made; None if the library cannot make them."""
        rule, slots, policy = rule_of(layer.policy), layer.slots, layer.policy
        if LIBRARY is None or rule is None or layer.history_now.geometry is None:
            return None
        q, k, v = inputs[:3]
        plain = all(
            x.is_cpu and x.stride(3) == 1 and type(x) is Tensor and not x.is_neg()
            for x in (q, k, v)
        )
        if not plain or inputs.sinks is not None or inputs.until is not None:
            return None
        if layer.readers and policy.evicts and policy.reach is None:
            return None  # it settles after the readings
        parts = slots.step_parts()
        if policy.ragged and (q.shape[0] > 1 or len(parts) != k.shape[1]):
            return None
        if rule.learn != Learn.NOTHING and any(part.before for part in parts):
            return None  # a policy's planes of frozen slots lie elsewhere
        if not parts or not all(possible(part, slots.codecs, inputs, rule) for part in parts):
            return None
        return cls(layer, inputs, rule, parts)

    def __reduce__(self) -> tuple[Any, ...]:
        return _no_plan, ()  # copies of a layer have other addresses

    # -- the next step ----------------------------------------------------------------------

    def ready(self, layer: LayerCache, entries: int) -> bool:
        """Whether the library can make the next step; if nobody has taken the layer's turn since
        the last one, when it had been taken `entries` times, nothing has to be looked up."""
        if self._frees and (layer.record_past or layer.evicted is not None):
            return False
        if self._entries == entries and self._turn is layer.turn:
            return self._threads == torch.get_num_threads()
        return self._find(layer)

    def known(self, layer: LayerCache) -> bool:
        """Whether nothing has happened since a step after which there is room for one token."""
        return self._entries == layer.turn.entries and self._turn is layer.turn

    def _find(self, layer: LayerCache) -> bool:
        """Look up what the next step does; False if the library cannot make it."""
        history, slots = layer.history_now, layer.slots
        if (
            layer.interrupted
            or slots is not self._slots
            or slots.hidden
            or slots.step_state() != self._state
            or history.geometry is not self._geometry
            or history.pads is not self._pads
            or self._threads != torch.get_num_threads()
            or any(one.part.storage.described() is not one.described for one in self.parts)
        ):
            return False
        length, columns = slots.length, history.columns
        if length != columns and not (history.floor or history.joined):
            return False
        if slots.block > 1 and slots.fills(1):
            return False
        self.column, self._turn = columns, layer.turn
        self._lengths = [storage.length for storage in self._storages]
        return self._decides(layer, length)

    def _decides(self, layer: LayerCache, length: int) -> bool:
        """Find which slots the next step frees and what its query sees; False if there is no room
        for its token, or frozen slots would have to go."""
        policy, window, columns = layer.policy, layer.window, self.column
        self.drops = self.evicts = 0
        self._dense = self._pads is None
        reach = policy.reach
        if reach is not None:
            self.drops = max(0, length - layer.reachable)
        if reach is not None or window is not None:
            after = (1, length + 1 - self.drops, columns + 1)
            hides = layer.chunked and hides_chunks(reach, window or 0, *after)
            if hides or limits(reach, window, *after, chunked=layer.chunked):
                self._dense = False
        budget = policy.budget_at(columns + 1) if policy.evicts else None
        if budget is not None:
            self.evicts = max(0, self._surplus(budget))
            if self.evicts:
                self._recent = policy.at(columns + 1).protection.recent
        frees = self.drops or self.evicts
        if self.drops > 1 or (frees and self._before):
            return False
        return all(one.part.storage.length - self.drops < one.capacity for one in self.parts)

    def _surplus(self, budget: int) -> int:
        """How many slots exceed the budget after the token, before the policy evicts."""
        if self._rule.floor is not None:
            return sum(self._lengths) - (budget - 1) * len(self._lengths)
        return self._before + max(self._lengths) + 1 - self.drops - budget

    def takes(self, inputs: StepInputs) -> bool:
        """Whether inputs of one token a row are of the kind that the plan was made for."""
        if inputs.sinks is not None or inputs.until is not None:
            return False
        if _exactly(inputs) != self._exactly and not self._takes_like(inputs):
            return False
        return not wants_gradients(*inputs[:3])

    def _takes_like(self, inputs: StepInputs) -> bool:
        """Whether inputs differ from those of the plan in nothing that matters."""
        plain = all(type(x) is Tensor and x.shape[2] == 1 and not x.is_neg() for x in inputs[:3])
        return plain and kind_of(inputs) is self.kind

    # -- a step -----------------------------------------------------------------------------

    def step(self, layer: LayerCache, inputs: StepInputs) -> Tensor | None:
        """Make a step; None, with nothing changed, if the library cannot. The caller has taken the
        layer's turn.

        Raises:
            MemoryError: there is no scratch memory.
        """
        entries, position = layer.turn.entries, inputs.position
        if not (self.ready(layer, entries - 1) and self.takes(inputs)):
            return None
        places = count = 0
        if position is not None:
            if position.dtype is not torch.int32 or not position.is_contiguous():
                return None
            places, count = position.data_ptr(), position.numel()
        if self._given:
            self.enter(layer, inputs)
        q, k, v = inputs[:3]
        out = q.new_empty(self.out_shape)
        tokens = TOKENS.pack(
            *(q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), places, count),
            *self._strides,
        )
        sequences = self.sequences()
        self.begin(layer)
        assert LIBRARY is not None
        result = LIBRARY.kv_step(sequences, len(self.parts), tokens)
        if result == UNLIKE:
            self.forget(layer)
            return None
        if result == FAILED:
            self.fail(layer)
            raise MemoryError(f"no scratch memory for a step over {layer.length} slots")
        self.count(layer, entries, position)
        return out

    def sequences(self, token: int = 0, contest: int = 1) -> bytes:
        """The packed KvSequences of the next step, one for each part.

        Args:
            token: the index of the layer's first row among the tokens of the call.
            contest: a number that no other layer of the call has.
        """
        if len(self.parts) == 1:
            return SEQUENCE.pack(
                *self.parts[0].addresses,
                *(token, 0, self.column, self._lengths[0], self.drops, self.evicts),
                *(
                    self._recent,
                    self._dense,
                    0,
                    0 if self._first is None else self._first.data_ptr(),
                ),
            )
        packed, compete = [], self._rule.floor is not None
        longest = max(self._lengths)
        for one in self.parts:
            row, head = one.part.row or 0, one.part.head or 0
            pad = 0 if self._pads is None else int(self._pads[row])
            held = one.part.storage.length
            # Shorter parts have room for what the longest must free.
            drops, evicts = (max(0, n - longest + held) for n in (self.drops, self.evicts))
            given = 0 if self._first is None else self._first[row, head:].data_ptr()
            packed.append(
                SEQUENCE.pack(
                    *one.addresses,
                    *(
                        token + row,
                        head,
                        self.column - pad,
                        held,
                        drops,
                        self.evicts if compete else evicts,
                    ),
                    *(self._recent, self._dense, contest if compete else 0, given),
                )
            )
        return b"".join(packed)

    def entered(
        self, layer: LayerCache, inputs: StepInputs, token: int, contest: int
    ) -> bytes | None:
        """`sequences` with what the policy gives for the token; None: it gives nothing."""
        if not self._given:
            return None
        self.enter(layer, inputs)
        return self.sequences(token, contest)

    def is_alike(self, kind: object) -> bool:
        """Whether a step of inputs of this kind can be made without looking at them."""
        return self.kind is kind and not self._given

    def enter(self, layer: LayerCache, inputs: StepInputs) -> None:
        """Ask the policy for its plane of the new token."""
        if self._given:
            n, device = 1, inputs.k.device
            position = (
                layer.next_positions(n, device) if inputs.position is None else inputs.position
            )
            arrivals = Arrivals(inputs.k, inputs.v, position, None, layer.rotary)
            (plane,) = layer.policy.enter(arrivals).values()
            self._first = plane[:, :, 0].float().contiguous()

    def take_turn(self, layer: LayerCache) -> None:
        """Begin a step that waits to be made. Until `end` the layer belongs to this thread.

        Raises:
            StateError: another thread is changing the layer.
        """
        layer.turn.__enter__()
        self.begin(layer)

    def end(self, layer: LayerCache, state: int, position: Tensor | None = None) -> None:
        """End it.

        Args:
            state: BEGUN: it was not made; RUNNING: it failed, or was interrupted; DONE.
        """
        try:
            if state == DONE:
                self.count(layer, layer.turn.entries, position)
            elif state == RUNNING:
                self.fail(layer)
            else:
                self.forget(layer)
        finally:
            layer.turn.__exit__(None, None, None)

    def begin(self, layer: LayerCache) -> None:
        """Record the state to return to, should the step be interrupted."""
        layer._begun, layer._writing = (layer._history, layer._slots.mark()), True
        layer._moving = (self.drops or self.evicts) > 0

    def forget(self, layer: LayerCache) -> None:
        """Nothing was changed after all."""
        layer._writing = layer._moving = False

    def fail(self, layer: LayerCache) -> None:
        """Return to the state before the step; if it was to free slots, the layer raises until it
        is reset."""
        if not layer._moving:
            layer._take_back()

    def count(self, layer: LayerCache, entries: int, position: Tensor | None) -> None:
        """Move the layer's cursor behind the token, which was written.

        Args:
            entries: how often the layer's turn will have been taken before the next step.
            position: the token's positions, if the caller knows them.
        """
        column, evicts = self.column, self.evicts
        if evicts > 1 or len(self.parts) > 1:
            self._count_parts()
        else:
            held = self._lengths[0] + 1 - self.drops - evicts
            self._storages[0].extend_to(held)
            self._lengths[0] = held
        floor = column + (evicts > 0) if evicts or self.drops else None
        layer._history = layer._history.with_column(floor=floor)
        layer._chunk = position
        layer._writing = layer._moving = False
        if self._follows and self._lengths[0] < self.parts[0].capacity and len(self.parts) == 1:
            self.column, self._entries = column + 1, entries
        else:
            self._entries = -1

    def _count_parts(self) -> None:
        """Count the token in each storage, which then frees what it no longer needs."""
        left = dict(zip([one.part.storage for one in self.parts], self._left.tolist(), strict=True))
        for storage, length in left.items():
            storage.extend_to(length)
            if self.evicts:
                storage.truncate(length)


def _no_plan() -> None:
    """What a plan is when it is copied."""
    return None


def _exactly(inputs: StepInputs) -> tuple[object, ...]:
    """Equal only for inputs that use the same records."""
    q, k, v = inputs[:3]
    return (
        *(q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride()),
        *(q.dtype, k.dtype, v.dtype, q.device, k.device, v.device, type(q), type(k), type(v)),
        *(q.is_neg(), k.is_neg(), v.is_neg(), inputs.scale, inputs.softcap),
    )


_kinds: dict[object, object] = {}
_MOST_KINDS = 1024


def kind_of(inputs: StepInputs) -> object:
    """What must be the same in all steps that use the same records, whatever the number of tokens:
    equal kinds are the same object."""
    kind = (
        _layout(inputs.q),
        _layout(inputs.k),
        _layout(inputs.v),
        inputs.scale,
        inputs.softcap,
    )
    if len(_kinds) == _MOST_KINDS:
        _kinds.clear()
    return _kinds.setdefault(kind, kind)


def _layout(x: Tensor) -> tuple[object, ...]:
    rows, heads, _, width = x.shape
    by_row, by_head, _, by_element = x.stride()
    return (rows, heads, width, by_row if rows > 1 else 0, by_head, by_element, x.dtype, x.device)


def _strides(inputs: StepInputs, out: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of KvTokens, in bytes, where tokens are rows and parts are kv heads."""
    q, k, v = inputs[:3]
    size, group = q.element_size(), q.shape[1] // k.shape[1]
    rows = (*(x.stride(0) for x in (q, k, v)), out[1] * out[3])
    heads = (group * q.stride(1), k.stride(1), v.stride(1), group * out[3])
    return tuple(size * stride for stride in (*rows, *heads))
