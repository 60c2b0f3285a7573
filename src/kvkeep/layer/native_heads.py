"""A decode step of a layer whose heads have different lengths, in one call of the native library.

The library makes the steps of several sequences in one call; here each kv head is one of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from kvkeep.attention import Segment
from kvkeep.checks import wants_gradients
from kvkeep.geometry import Geometry
from kvkeep.layer.frozen import FrozenRuns
from kvkeep.layer.history import History
from kvkeep.layer.native_step import (
    FAILED,
    SEQUENCE,
    TOKENS,
    NativeStep,
    kind_of,
    no_step,
)
from kvkeep.layer.parted import ByHead
from kvkeep.layer.slots import Codecs, LayerSlots
from kvkeep.layer.step import StepInputs
from kvkeep.native_library import LIBRARY
from kvkeep.storage import Storage

if TYPE_CHECKING:
    from kvkeep.layer.in_one_call import InOneCall


class OneHead(NamedTuple):
    """The slots of one head, as `NativeStep` sees those of a layer."""

    storage: Storage
    codecs: Codecs
    frozen: FrozenRuns = FrozenRuns()
    single: bool = True
    aside: None = None

    def segments(self) -> tuple[Segment, ...]:
        return (Segment(self.storage.read(), *self.codecs),)


class HeadsStep:
    """The packed records of a decode step of one row, of heads with slots of their own."""

    def __init__(
        self, slots: ByHead, geometry: Geometry, steps: list[NativeStep], inputs: StepInputs
    ) -> None:
        self._slots, self._geometry, self._steps = slots, geometry, steps
        self._storages = slots.storages
        self._kind = kind_of(inputs)
        # Of the first head's out, and from one head to the next.
        group, width = steps[0].out_shape[1], steps[0].out_shape[3]
        self._out_shape = (1, group * len(steps), 1, width)
        q, k, v = inputs[:3]
        self._by_head = group * q.stride(1), k.stride(1), v.stride(1), group * width

    @classmethod
    def of(
        cls, slots: LayerSlots, geometry: Geometry | None, inputs: StepInputs
    ) -> HeadsStep | None:
        """The records of a step like the one just made; None if the library cannot perform it."""
        if geometry is None or not isinstance(slots, ByHead) or inputs.q.shape[0] != 1:
            return None
        heads = inputs.k.shape[1]
        if len(slots.storages) != heads:
            return None
        steps = []
        for head, storage in enumerate(slots.storages):
            q, k, v = (x.chunk(heads, dim=1)[head] for x in inputs[:3])
            one: Any = OneHead(storage, slots.codecs)
            step = NativeStep.of(one, geometry, None, None, inputs._replace(q=q, k=k, v=v))
            if step is None:
                return None
            steps.append(step)
        return cls(slots, geometry, steps, inputs)

    def __reduce__(self) -> tuple[Any, ...]:
        return no_step, ()  # copies of a layer have other addresses

    def ready(self, layer: InOneCall, history: History, inputs: StepInputs) -> ReadyHeads | None:
        """The next step, with its token; None if the library cannot make it."""
        slots, column, position = self._slots, history.columns, inputs.position
        if slots is not layer.slots or slots.storages != self._storages:
            return None
        if history.geometry is not self._geometry or not self._takes(inputs):
            return None
        if position is not None and (position.numel() != 1 or int(position) != column):
            return None
        held = [storage.length for storage in self._storages]
        for step, length, storage in zip(self._steps, held, self._storages, strict=True):
            if length >= step.capacity or not step.describes(storage):
                return None
        return ReadyHeads(self, layer, inputs, column, held)

    def _takes(self, inputs: StepInputs) -> bool:
        return (
            inputs.k.shape[2] == inputs.v.shape[2] == 1
            and kind_of(inputs) is self._kind
            and inputs.sinks is None
            and inputs.until is None
            and not wants_gradients(*inputs[:3])
        )

    def packed(
        self, inputs: StepInputs, out: Tensor, column: int, held: list[int]
    ) -> tuple[bytes, bytes]:
        """The KvSequences, one for each head, and the KvTokens."""
        sequences = b"".join(
            [
                SEQUENCE.pack(*step.records, head, column, length, 0)
                for head, (step, length) in enumerate(zip(self._steps, held, strict=True))
            ]
        )
        tensors = (inputs.q, inputs.k, inputs.v, out)
        strides = (x.element_size() * n for x, n in zip(tensors, self._by_head, strict=True))
        return sequences, TOKENS.pack(*(x.data_ptr() for x in tensors), 0, *strides)

    def new_out(self, inputs: StepInputs) -> Tensor:
        """An empty tensor (1, Hq, 1, Dv) for the result."""
        return inputs.q.new_empty(self._out_shape)

    @property
    def storages(self) -> tuple[Storage, ...]:
        """Those of the heads."""
        return self._storages


class ReadyHeads:
    """A step that only waits to be run, like `ReadyStep`."""

    def __init__(
        self,
        native: HeadsStep,
        layer: InOneCall,
        inputs: StepInputs,
        column: int,
        held: list[int],
    ) -> None:
        self._native, self._layer, self._held = native, layer, held
        self._position, self._done = inputs.position, False
        self.out = native.new_out(inputs)
        self._records = native.packed(inputs, self.out, column, held)

    def begin(self) -> None:
        """As `ReadyStep.begin`."""
        layer = self._layer
        layer.turn.__enter__()
        layer._begun, layer._writing = (layer._history, tuple(self._held)), True

    def run(self) -> bool:
        """Write the token and attend to all slots; always True.

        Raises:
            MemoryError: there is no scratch memory.
        """
        assert LIBRARY is not None
        sequences, tokens = self._records
        if LIBRARY.kv_step_packed(sequences, len(self._held), tokens) == FAILED:
            raise MemoryError(f"no scratch memory for a step over {max(self._held)} slots")
        self._done = True
        return True

    def end(self) -> None:
        """Count the token, if the step has run; otherwise return to the state before it."""
        layer = self._layer
        try:
            if self._done:
                for storage, length in zip(self._native.storages, self._held, strict=True):
                    storage.extend_to(length + 1)
                layer._history = layer._history.with_column(floor=None)
                layer._chunk = self._position
                layer._writing = False
            else:
                layer._take_back()
        finally:
            layer.turn.__exit__(None, None, None)
