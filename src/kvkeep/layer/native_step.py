"""A decode step in one call of the native library.

In Python the parts of a step (checks, writing, describing the slots, attention, settling) take
longer than attention over a few hundred slots. Here everything that stays the same from step to
step is packed once, and a step passes on a few addresses and numbers.
"""

from __future__ import annotations

from struct import Struct
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvkeep.attention import Options
from kvkeep.attention.native import (
    CALL,
    call_of_step,
    heads_and_width,
    pack_segments,
    reads,
)
from kvkeep.checks import wants_gradients
from kvkeep.codec.groups import ENCODING, encoding
from kvkeep.geometry import Geometry
from kvkeep.layer.slots import LayerSlots
from kvkeep.layer.step import StepInputs
from kvkeep.layer.turn import Turn
from kvkeep.native_library import LIBRARY, address_of
from kvkeep.packing import PLAIN
from kvkeep.planes import POSITION, Reach, slot_count, unsliced
from kvkeep.policy.ranking import RANKING
from kvkeep.storage import Storage

if TYPE_CHECKING:
    from kvkeep.layer.in_one_call import InOneCall

_PLACE, _TOKEN, _RECORDS = Struct("=6q"), Struct("=9q"), Struct("=4q")
"""The positions of a KvStep, and KvToken, of native/abi.h; the arguments of kv_step."""

SEQUENCE, TOKENS = Struct("=8q"), Struct("=9q")
"""KvSequence and KvTokens of native/abi.h."""

FAILED, UNLIKE = 1, 2  # KvStepResult
_RECORDED = 3  # KV_RECORDED_STEP

_Records = tuple[int, int, int, int]
"""The arguments of kv_step that stay: addresses of records, and the number of planes."""

UNBEGUN, BEGUN, RUNNING, DONE = range(4)  # of a ReadyStep


class NativeStep:
    """The packed records of a layer's decode step: `fits` says whether they are those of a step,
    whose `token` then goes to the library with them.

    Args:
        slots: the layer's slots, after a decode step with these inputs.
        geometry: that of the tokens held.
        reach, window, chunked: the policy's reach and the layer's own window.
        inputs: of a step that has just been made.
    """

    def __init__(
        self,
        slots: LayerSlots,
        geometry: Geometry,
        reach: Reach | None,
        window: int | None,
        inputs: StepInputs,
        chunked: bool = False,
    ) -> None:
        q, k, v = inputs[:3]
        segments, codecs = slots.segments(), slots.codecs
        planes = unsliced(segments[-1].planes)
        heads, value_width = heads_and_width(segments[-1])
        place = planes[POSITION]
        rows, position_heads, self.capacity = place.shape
        places = place.data_ptr(), *place.stride()
        self._slots, self._frozen, self._geometry = slots, slots.frozen, geometry
        self._storage, self._planes = slots.storage, slots.storage.described()
        self._count = len(planes)
        self.bounded = reach is not None or window is not None
        self.kind, self.out_shape = kind_of(inputs), (*q.shape[:3], value_width)
        self.threads = torch.get_num_threads()
        self.repeated: StepInputs | None = None  # inputs that fit, and come again
        tensors: list[Tensor] = []
        self._segments = pack_segments(segments, q, True, tensors)
        # What the segments refer to, but not the queries, which each step brings: they may be a
        # view of those of a long chunk.
        own = q.untyped_storage().data_ptr()
        self._kept = [x for x in tensors if x.untyped_storage().data_ptr() != own]
        assert self._planes is not None  # `_possible`
        options = Options(inputs.scale, inputs.softcap)
        keys, values = codecs.key.layout, codecs.value.layout
        assert keys is not None  # `possible`
        assert values is not None
        kept = Reach(0) if reach is None else reach
        self._step = step = b"".join(
            [
                CALL.pack(*call_of_step(q, heads, value_width, len(segments), options)),
                ENCODING.pack(*encoding(k, planes, "k", keys)),
                ENCODING.pack(*encoding(v, planes, "v", values)),
                _PLACE.pack(*places, 0, position_heads),
                RANKING.pack(
                    *(0, places[0], 0, 0, 0, 0, *places[1:3], 0, rows, position_heads, 0, 1),
                    *(0, *kept[1:], window or 0, chunked),
                ),
            ]
        )
        packed = address_of(step), address_of(self._segments), address_of(self._planes)
        self.records: _Records = (*packed, self._count)
        self.packed_records = _RECORDS.pack(*self.records)

    @classmethod
    def of(
        cls,
        slots: LayerSlots,
        geometry: Geometry | None,
        reach: Reach | None,
        window: int | None,
        inputs: StepInputs,
        chunked: bool = False,
    ) -> NativeStep | None:
        """The records of a step like the one just made; None if the library cannot perform it."""
        if geometry is None or not _possible(slots, inputs):
            return None
        return cls(slots, geometry, reach, window, inputs, chunked)

    def __reduce__(self) -> tuple[Any, ...]:
        return no_step, ()  # copies of a layer have other addresses

    @property
    def frozen(self) -> int:
        """Slots that are frozen."""
        return self._frozen.length

    def describes(self, storage: Storage) -> bool:
        """Whether this is the storage, with its slots at the same addresses."""
        return (
            storage is self._storage
            and storage.described() is self._planes
            and torch.get_num_threads() == self.threads
        )

    def holds(self, slots: LayerSlots, geometry: Geometry | None) -> bool:
        """Whether these are the slots, at the same addresses."""
        return (
            slots is self._slots
            and slots.frozen is self._frozen
            and geometry is self._geometry
            and self.describes(slots.storage)
        )

    def takes(self, inputs: StepInputs) -> bool:
        """Whether inputs of one token a row are of the kind that the records were made for."""
        return inputs is self.repeated or (
            inputs.k.shape[2] == inputs.v.shape[2] == 1
            and kind_of(inputs) == self.kind
            and inputs.sinks is None
            and inputs.until is None
            and not wants_gradients(*inputs[:3])
        )

    def token(self, inputs: StepInputs, out: Tensor, step: ReadyStep) -> bytes | None:
        """The packed KvToken; None if `kv_step` does not read the positions as they are.

        Args:
            out: for the result, as `new_out` makes it.
            step: says where the token is written.
        """
        q, k, v, position = inputs[:4]
        places = count = 0
        if position is not None:
            if position.dtype is not torch.int32 or not position.is_contiguous():
                return None
            places, count = position.data_ptr(), position.numel()
        return _TOKEN.pack(
            q.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            out.data_ptr(),
            places,
            count,
            step.column,
            step.held,
            step.drops,
        )

    def new_out(self, inputs: StepInputs) -> Tensor:
        """An empty tensor (B, Hq, 1, Dv) for the result."""
        return inputs.q.new_empty(self.out_shape)


def no_step() -> None:
    """What records of a step are when they are copied."""
    return None


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


def _possible(slots: LayerSlots, inputs: StepInputs) -> bool:
    """Whether the library can perform a step like this one, of one token a row."""
    if LIBRARY is None or not slots.single or slots.aside is not None:
        return False
    if slots.storage.described() is None or slots.frozen.hides:
        return False
    q, k, v = inputs[:3]
    plain = all(
        x.is_cpu and x.stride(3) == 1 and type(x) is Tensor and not x.is_neg() for x in (q, k, v)
    )
    if not plain or inputs.sinks is not None:
        return False
    for segment in slots.segments():
        planes = unsliced(segment.planes)
        if segment.rotation is not None or not reads(q, segment):
            return False
        if any(plane.dim() == 4 and plane.stride(3) != 1 for plane in planes.values()):
            return False
    tail = ((slots.codecs.key, k, "k"), (slots.codecs.value, v, "v"))
    return (
        all(codec.layout != PLAIN or planes[name].dtype is x.dtype for codec, x, name in tail)
        and slot_count(planes) > 0
    )


class ReadyStep:
    """A step that only waits to be run: `begin`, `run`, and in any case `end`. From `begin` to
    `end` the layer belongs to this thread.

    Several layers can be prepared before the first runs: Python that has just run takes a fraction
    of the time of Python that weights have displaced from the processor's caches.
    """

    __slots__ = (
        *("_entries", "_state", "_turn", "column", "drops", "held", "layer", "length", "native"),
        *("out", "position", "token"),
    )

    def __init__(
        self,
        layer: InOneCall,
        native: NativeStep,
        column: int,
        length: int,
        held: int,
        drops: bool,
    ) -> None:
        """A step that writes the token of position `column` behind the `length` slots in use of the
        layer, `held` of them in its storage, after freeing one if it `drops`."""
        self.layer: InOneCall | None = layer  # until the end
        self.native, self._state = native, UNBEGUN
        self.column, self.length, self.held, self.drops = column, length, held, drops
        self.token = b""  # packed
        self.position: Tensor | None = None
        self.out: Tensor | None = None
        self._turn, self._entries = layer.turn, 0

    def __reduce__(self) -> tuple[Any, ...]:
        return no_step, ()  # of a layer whose copies have other addresses

    def follows(self, turn: Turn) -> bool:
        """Whether the turn was not taken since the step before this one."""
        return self._entries == turn.entries and self._turn is turn

    @property
    def records(self) -> _Records:
        """The arguments of `kv_step` before the token."""
        return self.native.records

    @property
    def kind(self) -> object:
        """What `kind_of` says of the inputs that it takes."""
        return self.native.kind

    def recorded(self) -> tuple[int, bytes]:
        """See `kvkeep.graph.ready.Ready`."""
        return _RECORDED, self.native.packed_records + self.token

    def begin(self) -> None:
        """Record the state to return to, should the step be interrupted.

        Raises:
            StateError: another thread is changing the layer.
        """
        layer = self.layer
        assert layer is not None
        layer.turn.__enter__()
        self._state = BEGUN
        layer._begun, layer._writing = (layer._history, (self.length,)), True
        layer._moving = self.drops

    def run(self) -> bool:
        """Write the token and attend to all slots; False, with nothing changed and the step ended,
        if the token's position in some row is not the next column.

        Raises:
            MemoryError: there is no scratch memory; a slot may have been freed.
        """
        assert LIBRARY is not None
        self.start()
        return self.finish(LIBRARY.kv_step(*self.records, self.token))

    def start(self, running: bool = True) -> None:
        """Note that the caller is about to call the library, or that it did not after all."""
        self._state = RUNNING if running else BEGUN

    def finish(self, result: int) -> bool:
        """Note the result of the library; as `run`."""
        if result == FAILED:
            self._state = RUNNING  # a slot may have been freed
            raise MemoryError(f"no scratch memory for a step over {self.length} slots")
        if result == UNLIKE:
            self._state = BEGUN
            self.end()
            return False
        self._state = DONE
        return True

    def end(self, state: int | None = None) -> None:
        """Count the token, if the step has run; otherwise return to the state before it.

        Args:
            state: what became of the step (BEGUN, RUNNING or DONE), if the caller made it; None:
                what `start` and `finish` were told.
        """
        layer = self.layer
        if layer is None or self._state == UNBEGUN:
            return
        state = self._state if state is None else state
        self._state, self.layer = UNBEGUN, None
        try:
            if state == DONE:
                column, drops, held = self.column, self.drops, self.held + 1 - self.drops
                layer._slots.storage.extend_to(held)
                layer._history = layer._history.with_column(floor=column if drops else None)
                layer._chunk = self.position
                native = self.native
                if native.bounded or held == native.capacity:
                    layer._next = None
                else:
                    self.column, self.length, self.held = column + 1, self.length + 1, held
                    self._entries, layer._next = layer.turn.entries, self
            if state != RUNNING:
                layer._writing = layer._moving = False
            elif not layer._moving:
                layer._take_back()
        finally:
            layer.turn.__exit__(None, None, None)
