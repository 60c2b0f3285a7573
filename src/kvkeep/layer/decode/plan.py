"""StepPlan: a layer's decode step (one token a row) as one call of the native library. The stages
of a step in Python take longer than attention over a few hundred slots."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any

import torch
from torch import Tensor

from kvkeep.checks import wants_gradients
from kvkeep.layer.cursor import State
from kvkeep.layer.decode.parts import StepPart, count_slots, grow_slots, step_parts, step_state
from kvkeep.layer.decode.possible import planned_parts
from kvkeep.layer.decode.records import (
    SEQUENCE,
    TOKENS,
    LayerRecords,
    PartRecords,
    exactly,
    is_like,
    is_read,
    kind_of,
    packed_kind,
    strides_of,
    without_memory,
)
from kvkeep.layer.step import StepInputs, slopes_on
from kvkeep.layer.writing import Writer
from kvkeep.native_library import LIBRARY, address_of
from kvkeep.planes import LAST, Chunks, limits
from kvkeep.policy import Arrivals
from kvkeep.policy.base import interval_of, rule_of
from kvkeep.policy.normal_queries import QUERIES, Queries
from kvkeep.policy.rule import Enter, Learn, Rule
from kvkeep.policy.share import Share
from kvkeep.storage import Storage

FAILED, UNLIKE = 1, 2  # KvStepResult


class StepPlan:
    """A layer's decode steps (one token per row): a call packed once and repeated for new tokens.

    After a step, the plan already has the numbers of the next one. If any other code takes the
    layer's turn, the plan reads them again from the layer. Besides `LayerCache`, only plans move a
    layer's cursor.

    Attributes:
        kind: kind of inputs that the plan accepts; see `kind_of`.
        packed_kind: `kind` as a packed KvKind.
        looks: whether a step can be packed only with its inputs, which the policy must see.
    """

    column: int
    """The column of the next token."""
    drops: int
    """1 if the next step frees, before it writes its token, a slot that its query cannot reach."""
    evicts: int
    """Number of slots that the next step frees after attention; of all heads if heads compete."""
    leaves: int
    """1 if a token leaves the tail after attention of the next step."""
    renews: bool
    """Whether the next step computes the policy's scores anew."""

    def __init__(
        self, writer: Writer, inputs: StepInputs, rule: Rule, parts: Sequence[StepPart]
    ) -> None:
        cursor, policy, setup = writer.cursor, writer.policy, writer.setup
        history, slots = cursor.history, cursor.slots
        assert history.geometry is not None  # `of` has checked it
        rows = inputs.k.shape[0]
        left = torch.zeros(2 * len(parts), dtype=torch.int64)
        self._left = left.numpy()
        centre, self._centre = writer.centre, history.centre
        self._most = LAST if centre is None else centre.turns.most  # columns
        self._records = LayerRecords(
            policy,
            rule,
            history.geometry.value_width,
            *(setup.window, history.pads, slopes_on(setup.slopes, inputs.q.device), centre),
            setup.rotary,
            left,
            without_memory(inputs),
        )
        self.parts: list[PartRecords] = []
        self._hold(parts)
        self._sinks = setup.codecs.key.sinks
        self._slots, self._state = slots, step_state(slots)
        self._geometry, self._pads, self._rule = history.geometry, history.pads, rule
        self.looks = Enter.GIVEN in rule.enter.values()
        # Truncation cannot undo changed scores.
        self._changes = rule.learn != Learn.NOTHING
        self._frees = policy.evicts or policy.reach is not None or self._changes
        # Chunked windows must be looked up for each step, a budget that is a share now and then.
        self._follows, self._until = not isinstance(setup.window, Chunks), LAST
        self._reach, self._budget, self._shared = policy.reach, policy.budget, bool(policy.share)
        self._in_blocks, self._free = slots.late and not self._behind, 0
        self._threads = torch.get_num_threads()
        self.cursor, self._turn, self._entries, self._counted = cursor, cursor.turn, -1, -1
        self._policy, self._sight, self._rotary = policy, setup.sight, setup.rotary
        self.kind, self._exactly = kind_of(inputs), exactly(inputs)
        self.packed_kind = packed_kind(self.kind)
        self.out_shape = (rows, inputs.q.shape[1], 1, history.geometry.value_width)
        self._strides = strides_of(inputs, self.out_shape)
        self.column = self.drops = self.evicts = self.leaves = 0
        self.renews, self._packed = False, b""  # the packed KvQueries of a step that renews scores
        self._frees_now = False  # whether the next step frees or moves slots, or renews scores
        self._safe = 0  # slots that a competing head cannot lose
        self._recent = 0 if self._shared else policy.protection.recent
        self._interval, self._fixed_slots = rule.interval, policy.protection.fixed
        self._shifts = [0] * rows if history.pads is None else history.pads.tolist()
        self._lengths: list[int] = []
        self._mark: tuple[int, ...] = ()  # of the slots, to return to after an interrupt
        # A row that had longer rows beside it may have empty slots.
        self._gaps = policy.ragged and any(bool((x.position < 0).any()) for x in slots.segments())
        self._dense, self._sequence = True, b""
        self._first: Tensor | None = None  # the policy's values for the new token
        self._observed: Queries  # the policy's state after a step that renews scores

    def _hold(self, parts: Sequence[StepPart]) -> None:
        """Pack the records of parts whose slots have moved."""
        old: Sequence[PartRecords | None] = self.parts or [None] * len(parts)
        held = [
            self._records.of(index, part, one) if one is None or one.moved else one
            for index, (part, one) in enumerate(zip(parts, old, strict=True))
        ]
        capacities = {one.part.storage: one.capacity for one in held}
        self._storages: list[Storage] = [*capacities]
        self._capacities = [*capacities.values()]
        self._place = [self._storages.index(part.storage) for part in parts]
        self._last = [*{place: index for index, place in enumerate(self._place)}.values()]
        self._fixed = [
            (one.addresses, one.part.row or 0, one.part.head or 0, place)
            for one, place in zip(held, self._place, strict=True)
        ]
        self._coded = [sum(segment.slots for segment in part.before) for part in parts]
        self._before = max(self._coded)
        self._behind = [one.behind for one in held if one.behind is not None]
        self.parts = held  # last: if this is interrupted, the parts still count as moved

    @classmethod
    def of(cls, writer: Writer, inputs: StepInputs) -> StepPlan | None:
        """A plan for repeating the last step with new tokens; None if the library cannot do so."""
        rule, parts = rule_of(writer.policy), planned_parts(writer, inputs)
        if not parts or rule is None:
            return None
        return cls(writer, inputs, rule, parts)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # a copied layer's buffers have other addresses, so drop the plan

    # -- the next step ----------------------------------------------------------------------

    def ready(self, entries: int | None = None) -> bool:
        """Whether the library can make the next step. If the turn was not taken since the last
        step, the numbers kept from it serve; otherwise they are looked up.

        Args:
            entries: the turn's count before the caller took it; None: the caller does not hold it.
        """
        cursor = self.cursor
        entries = cursor.turn.entries if entries is None else entries
        if cursor.unread or (self._frees and (cursor.record_past or cursor.evicted is not None)):
            return False
        if self._entries == entries and self._turn is cursor.turn:
            return self._threads == torch.get_num_threads()
        return self._find(entries)

    @property
    def known(self) -> bool:
        """Whether the last call was a step that left room for one more token."""
        cursor = self.cursor
        last = self._entries == cursor.turn.entries and self._turn is cursor.turn
        return last and not cursor.unread

    def _find(self, entries: int) -> bool:
        """Look up the next step; False if the library cannot make it. `entries`: see `ready`."""
        cursor = self.cursor
        history, slots = cursor.history, cursor.slots
        if not self._applies() or not self._stays():
            return False
        length, columns = slots.length, history.columns
        if length != columns and not (history.floor or history.joined):
            return False
        budget = self._look_up_budget(columns)
        if self._behind:
            self._coded = [one.part.storage.length for one in self._behind]
            self._before = max(self._coded)
        elif self._in_blocks:
            self._free = next(n for n in count() if slots.waiting(budget, n + 1))
            if not self._free:
                return False
        if self._counted != entries or self._turn is not cursor.turn:
            for one in (*self.parts, *self._behind):
                if one.memory is not None:
                    one.memory[:, :, 0] = 0  # slots may have changed
        self.column, self._turn = columns, cursor.turn
        self._lengths = [storage.length for storage in self._storages]
        self._mark = slots.mark()
        reached = length if self._reach is None else self._sight.reachable(cursor)
        self.drops = max(0, length - reached)
        return self._grow() and self._decides(length, budget)

    def _look_up_budget(self, columns: int) -> int | None:
        """The policy's budget once one more token than `columns` is fed."""
        policy = self._policy.at(columns + 1)
        budget = self._budget = policy.budget
        if budget is None:
            return None
        self._safe = int((self._rule.floor or 0.0) * budget)
        if self._shared:
            self._recent = policy.protection.recent
            self._until = Share.fullest(columns + 1)  # until then, the budget grows with the tokens
            if self._rule.interval:
                self._interval = interval_of(policy)
                if interval_of(self._policy.at(self._until)) != self._interval:
                    self._until = columns + 1
        return budget

    def _applies(self) -> bool:
        """Whether the layer has the slots and the history for which the plan was made."""
        history, slots = self.cursor.history, self.cursor.slots
        return (
            self.cursor.state is State.IDLE
            and slots is self._slots
            and not slots.hidden
            and step_state(slots) == self._state
            and history.geometry is self._geometry
            and history.pads is self._pads
            and history.centre is self._centre
            and self._threads == torch.get_num_threads()
        )

    def serves(self, inputs: StepInputs) -> bool:
        """Whether the plan can make later steps with inputs like these, although the library may
        not have been able to make the last one."""
        within = self.cursor.history.columns < self._most
        return within and self.takes(inputs) and self._applies()

    def _stays(self) -> bool:
        """Pack the records of slots that moved. False if the plan does not fit the slots."""
        if not any(one.moved for one in self.parts):
            return True
        parts, rows = step_parts(self._slots), self.out_shape[0]
        fit = [len(part.planes["k"]) == (rows if part.row is None else 1) for part in parts]
        if len(fit) != len(self.parts) or not all(fit):
            return False
        self._hold(parts)
        return True

    def _grow(self) -> bool:
        """If there is no room for the next token, allocate slots as an append does. False if the
        plan does not fit the slots afterwards."""
        spare = max(self._lengths) - (0 if self._behind else self.drops)
        held = zip(self._storages, self._lengths, strict=True)
        needs = [(storage, min(length, spare) + 1) for storage, length in held]
        coded = zip(self._behind, self._coded, strict=False)
        needs += [(one.part.storage, length + 1 - self.drops) for one, length in coded]
        grow_slots(needs, self.cursor.turn)
        return self._stays()

    def _decides(self, length: int, budget: int | None) -> bool:
        """Determine which slots the next step frees and what its query sees. False if there is no
        room for its token, or if the step would free frozen slots.

        Args:
            length: slots in use, of which the next query cannot reach `drops`.
            budget: the policy's budget once the token is fed; None: all reachable slots are kept.
        """
        reach, window, columns, drops = self._reach, self._sight.window, self.column, self.drops
        due = self._interval
        self.renews = due > 0 and any((columns + 1 - n) % due == 0 for n in self._shifts)
        self._dense = self._pads is None and not self._gaps
        if self._dense and (reach is not None or window is not None):
            after = (1, length + 1 - drops, columns + 1)
            hides = isinstance(window, Chunks) and window.hides(reach, *after)
            self._dense = not (hides or limits(reach, window, *after))
        self.evicts = 0 if budget is None else max(0, self._surplus(budget))
        if drops > 1 or columns >= self._most:
            return False
        self.leaves = 0
        if self._behind:
            self.leaves = self._slots.waiting(budget, 1)
            if self.leaves > 1 or (drops and min(self._coded) <= 1 + self._fixed_slots):
                return False
        elif self._before and (drops or self.evicts):
            return False
        # A part shorter than the longest frees fewer slots before its token is written.
        spare = max(self._lengths) - (0 if self._behind else drops)
        for held, capacity in zip(self._lengths, self._capacities, strict=True):
            if min(held, spare) >= capacity:
                return False
        for held, one in zip(self._coded, self._behind, strict=False):
            if held - drops >= one.capacity:
                return False
        self._frees_now = bool(drops or self.evicts or self.leaves or self.renews)
        return True

    def _surplus(self, budget: int) -> int:
        """Number of slots over the budget once the token is written."""
        if self._rule.floor is not None:
            held = sum(self._coded) + sum(map(self._lengths.__getitem__, self._place))
            return held - (budget - 1) * len(self.parts)
        return self._before + max(self._lengths) + 1 - self.drops - budget

    def takes(self, inputs: StepInputs) -> bool:
        """Whether the plan accepts inputs of one token a row."""
        if inputs.special:
            return False
        if exactly(inputs) != self._exactly and not is_like(inputs, self.kind):
            return False
        return not wants_gradients(*inputs[:3])

    # -- a step -----------------------------------------------------------------------------

    def step(self, inputs: StepInputs) -> Tensor | None:
        """Make a step. If the library cannot make it, return None; nothing has changed. The caller
        holds the layer's turn.

        Raises:
            MemoryError: there is no scratch memory.
        """
        cursor, position = self.cursor, inputs.position
        entries = cursor.turn.entries
        if (  # the first checks of `ready`, inlined to save a call per step
            self._entries != entries - 1
            or self._turn is not cursor.turn
            or self._threads != torch.get_num_threads()
            or (self._frees and (cursor.record_past or cursor.evicted is not None))
        ):
            if not self.ready(entries - 1):
                return None
            entries = cursor.turn.entries
        q, k, v = inputs[:3]
        gradients = q.requires_grad or k.requires_grad or v.requires_grad
        if gradients or not (inputs.sinks is inputs.until is inputs.bias is None):
            if not self.takes(inputs):
                return None
        elif exactly(inputs) != self._exactly and not is_like(inputs, self.kind):
            return None
        places = given = 0
        if position is not None:
            if not is_read(position, q.shape[0]):
                return None
            places, given = position.data_ptr(), position.numel()
        if self.looks:
            self.enter(inputs)
        out = q.new_empty(self.out_shape)
        tokens = TOKENS.pack(
            *(q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), places, given),
            *self._strides,
        )
        sequences = self.sequences()
        cursor.start = cursor.history, self._mark
        moves = self._changes or self._frees_now
        cursor.state = State.MOVING if moves else State.WRITING
        assert LIBRARY is not None
        result = LIBRARY.kv_step(sequences, len(self.parts), tokens)
        if result == UNLIKE:
            cursor.state = State.IDLE  # the call changed nothing
            return None
        if result == FAILED:
            if not self._frees_now:
                cursor.take_back()
            raise MemoryError(f"no scratch memory for a step over {cursor.slots.length} slots")
        self.count(entries, position)
        return out

    def sequences(self, token: int = 0, contest: int = 1) -> bytes:
        """The packed KvSequences of the next step, one for each part.

        Args:
            token: index of the layer's first row among the tokens of the call.
            contest: a number unique to this layer in the call.
        """
        queries = 0
        if self.renews:
            positions = [self.column - n for n in self._shifts]
            renewal = self.cursor.history.memory, positions, self._interval, self.parts
            self._observed, self._packed = self._records.queries(*renewal)
            queries = address_of(self._packed)
        if len(self.parts) == 1:
            given = 0 if self._first is None else self._first.data_ptr()
            behind = self._pack_behind(0, 0) if self._behind else 0
            drops = 0 if self._behind else self.drops
            return SEQUENCE.pack(
                *self.parts[0].addresses,
                *(token, 0, self.column, self._lengths[0], drops, self.evicts),
                *(self._recent, self._dense, 0, 0, given, behind, 0, 0, queries),
            )
        competes = self._rule.floor is not None
        longest, drops, evicts = max(self._lengths), self.drops, self.evicts
        contest, behind = contest if competes else 0, 0
        if self._behind:  # heads evict from the slots behind their tail
            behind = self._pack_behind(contest, max(0, self._safe + self.leaves - longest - 1))
        first, column, shifts = self._first, self.column, self._shifts
        fixed = self._recent, self._dense, contest, self._safe
        packed: list[bytes] = []
        for addresses, row, head, place in self._fixed:
            held = self._lengths[place]
            spare = longest - held  # by which a shorter part frees fewer slots
            given = 0 if first is None else first[row, head:].data_ptr()
            frees = max(0, drops - spare), evicts if competes else max(0, evicts - spare)
            own = token + row, head, column - shifts[row], held, *frees
            packed.append(SEQUENCE.pack(*addresses, *own, *fixed, given, behind, 0, 0, queries))
            behind += SEQUENCE.size if behind else 0
            queries += QUERIES.size if queries else 0
        return b"".join(packed)

    def _pack_behind(self, contest: int, safe: int) -> int:
        """The address of the packed KvSequences of the slots behind a tail, one for each part."""
        fixed = self.drops, self.evicts, self._recent, self._dense, contest, safe
        last = 0, 0, self.leaves, self._sinks, 0
        self._sequence = b"".join(
            SEQUENCE.pack(*one.addresses, 0, 0, self.column, held, *fixed, *last)
            for one, held in zip(self._behind, self._coded, strict=True)
        )
        return address_of(self._sequence)

    def enter(self, inputs: StepInputs) -> None:
        """Ask the policy for its plane values of the new token."""
        k, v, position = inputs[1:4]
        if position is None:
            position = self.cursor.history.next_positions(1, k.device)
        planes = self._policy.enter(Arrivals(k, v, position, None, self._rotary))
        given = next(x for x, enter in self._rule.enter.items() if enter == Enter.GIVEN)
        self._first = planes[given][:, :, 0].float().contiguous()

    def take_turn(self, entries: int) -> None:
        """Begin a prepared step. This thread holds the layer's turn until `end`.

        Args:
            entries: the turn's count when the step was prepared.

        Raises:
            StateError: another thread is changing the layer, or has changed it since preparation.
        """
        cursor = self.cursor
        cursor.turn.continue_from(entries)
        cursor.start = cursor.history, self._mark
        moves = self._changes or self._frees_now
        cursor.state = State.MOVING if moves else State.WRITING

    def count(self, entries: int, position: Tensor | None) -> None:
        """Advance the layer's cursor past the written token, and compute the next step's numbers
        unless they must be looked up.

        Args:
            entries: the turn's count now; the next step checks that it is unchanged.
            position: positions of the token, if the caller knows them.
        """
        cursor = self.cursor
        column, evicts, lengths = self.column, self.evicts, self._lengths
        renewed = column + 2 > self._until
        follows = self._follows and not (renewed and self._in_blocks)
        left = self._left.tolist() if self._behind or evicts > 1 or len(self.parts) > 1 else ()
        if self._behind:
            lengths[0] += 1 - self.leaves
            self._storages[0].extend_to(lengths[0])
            behind = [one.part.storage for one in self._behind]
            capacities = [one.capacity for one in self._behind]
            follows &= count_slots(behind, self._coded, capacities, left[len(self.parts) :])
            self._before = max(self._coded)
        elif left:
            own = [left[index] for index in self._last]
            follows &= count_slots(self._storages, lengths, self._capacities, own)
        else:
            lengths[0] += 1 - self.drops - evicts
            self._storages[0].extend_to(lengths[0])
        moved = evicts > 0 or (self.leaves > 0 and self._pads is not None)
        floor = column + moved if moved or self.drops else None
        cursor.history = cursor.history.with_column(floor=floor)
        if self.renews:
            cursor.history.memory = self._observed.state
        cursor.queries, cursor.unread = None, cursor.readers
        cursor.chunk, cursor.state = position, State.IDLE
        self._entries, self._counted = -1, entries
        if not follows:
            return
        self.column = column + 1
        if renewed:
            self._look_up_budget(column + 1)
        elif self._shared and self._budget is not None:
            self._budget += 1
        if self._behind:
            self._mark = (*self._coded, lengths[0])
        elif self._in_blocks:
            self._free -= 1
            if not self._free:
                return
            self._mark = (*self._mark[:-1], self._mark[-1] + 1)
        else:
            self._mark = (self._before + lengths[0],) if len(lengths) == 1 else tuple(lengths)
        length, reach = self._before + max(lengths), self._reach
        self.drops = 0 if reach is None else max(0, length + 1 - reach.size - reach.fixed)
        if self._decides(length, self._budget):
            self._entries = entries
