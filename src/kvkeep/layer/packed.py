"""PackedLayer: the same layer of several sequences, whose tokens lie in one row."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import accumulate
from struct import Struct

import torch
from torch import Tensor

from kvkeep.attention import dispatch_several, several_at_once
from kvkeep.checks import wants_gradients
from kvkeep.errors import UnsupportedError
from kvkeep.layer.attending import AttendingLayer
from kvkeep.layer.layer import LayerCache
from kvkeep.layer.native_step import (
    BEGUN,
    DONE,
    FAILED,
    RUNNING,
    TOKENS,
    UNLIKE,
    ReadyStep,
    kind_of,
)
from kvkeep.layer.step import Phases, StepInputs, finished, require_causal
from kvkeep.native_library import LIBRARY, address_of

_CALL = Struct("=3q")  # the arguments of kv_step_packed

_RECORDED = 4  # KV_RECORDED_PACKED


def packed_tokens(inputs: StepInputs, out: Tensor) -> bytes:
    """The KvTokens of inputs with one token of each sequence, (1, heads, n, width)."""
    q, k, v, position = inputs[:4]
    places = position is not None and position.dtype is torch.int32 and position.is_contiguous()
    return TOKENS.pack(
        q.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        out.data_ptr(),
        position.data_ptr() if position is not None and places else 0,
        *(x.stride(2) * x.element_size() for x in (q, k, v, out)),
    )


class PackedLayer(AttendingLayer):
    """Runs a step of each sequence's own layer, on its range of the tokens. The steps of one token
    that the native library can make are one call of it, whose threads share the work of all.

    Args:
        layers: one layer of each sequence's cache; they hold one row each, or nothing.
        counts: how many tokens of each sequence there are, in order.
    """

    def __init__(self, layers: Sequence[LayerCache], counts: Sequence[int]) -> None:
        self._layers, self._counts = layers, counts
        self._ready: dict[int, ReadyStep] = {}  # by the sequence
        self._state = BEGUN  # of the steps that are ready

    def __len__(self) -> int:
        """How many sequences there are."""
        return len(self._layers)

    @property
    def window(self) -> int | None:
        """The layer's own sliding window, in tokens."""
        return self._layers[0].window

    @property
    def chunked(self) -> bool:
        return self._layers[0].chunked

    def next_positions(self, n: int, device: torch.device, real: Tensor | None = None) -> Tensor:
        """The tokens' positions, each in its own sequence: int32 (n,)."""
        if n != sum(self._counts) or real is not None:
            raise UnsupportedError(
                f"a packed forward of {sum(self._counts)} tokens asks for positions of {n}; the "
                "model divides the tokens or pads them, so feed its sequences one by one"
            )
        found = [
            layer.next_positions(count, device)
            for layer, count in zip(self._layers, self._counts, strict=True)
        ]
        return torch.cat(found)

    def prepare(self) -> None:
        """Prepare the steps that the native library can make. They hold their layers until `end`.

        All layers are prepared before the first runs: Python that has just run takes a fraction of
        the time of Python that weights have displaced from the processor's caches.

        Raises:
            StateError: another thread is changing a layer.
        """
        first = 0
        for sequence, (layer, count) in enumerate(zip(self._layers, self._counts, strict=True)):
            if count == 1:
                step = layer.prepare_packed(first)
                if step is not None:
                    self._ready[sequence] = step
                    step.begin()
            first += count

    def end(self) -> None:
        """Count the tokens of the steps that the native library made, and return the others'
        layers to their state before `prepare`."""
        for step in self._ready.values():
            step.end(self._state)
        self._ready.clear()

    def run(self, inputs: StepInputs) -> Tensor:
        """Attention of all tokens: (1, Hq, n, Dv); see `LayerCache.run`."""
        require_causal(inputs)
        q, v = inputs.q, inputs.v
        # As models use it next: the heads of a token side by side.
        out = q.new_empty(1, q.shape[2], q.shape[1], v.shape[3]).transpose(1, 2)
        made = self._run_together(inputs, out) or self._attend_together(inputs, out)
        first = 0
        for sequence, (layer, count) in enumerate(zip(self._layers, self._counts, strict=True)):
            if sequence not in made:
                out[:, :, first : first + count] = layer.run(inputs.part(first, count))
            first += count
        return out

    def _attend_together(self, inputs: StepInputs, out: Tensor) -> Collection[int]:
        """Make the steps of single tokens, with one call of attention for all of them where a
        backend has one; returns their sequences."""
        singles = [sequence for sequence, count in enumerate(self._counts) if count == 1]
        if len(singles) < 2 or not several_at_once(inputs.q):
            return ()
        first = list(accumulate(self._counts, initial=0))
        phases: list[Phases] = []
        try:
            calls = []
            for sequence in singles:
                own = inputs.part(first[sequence], 1)
                phases.append(self._layers[sequence].phases(own))
                calls.append(next(phases[-1]))
            found = dispatch_several(calls)
            for sequence, step, result in zip(singles, phases, found, strict=True):
                at = first[sequence]
                out[:, :, at : at + 1] = finished(step, result)
        finally:
            for step in phases:
                step.close()  # one that is not finished is taken back
        return singles

    def ready_for(self, kind: object, tokens: bytes) -> ReadyTogether | None:
        """The steps of all sequences, to be made by one call of the library; None: not all are
        ready, for inputs of this kind (see `kind_of`).

        Args:
            tokens: the packed KvTokens.
        """
        ready = self._ready
        if len(ready) < len(self._layers) or any(x.kind is not kind for x in ready.values()):
            return None
        return ReadyTogether(self, b"".join([x.token for x in ready.values()]), len(ready), tokens)

    def note(self, state: int) -> None:
        """Note what became of the steps that were ready: BEGUN, RUNNING or DONE."""
        self._state = state

    def _run_together(self, inputs: StepInputs, out: Tensor) -> Collection[int]:
        """Make the steps that are ready by one native call; returns their sequences. Those of other
        inputs than expected are ready no more."""
        ready = self._ready
        if not ready:
            return ()
        kind = kind_of(inputs)
        if wants_gradients(*inputs[:3]) or inputs.sinks is not None:
            kind = None
        for sequence in [x for x, step in ready.items() if step.kind is not kind]:
            ready.pop(sequence).end()
        if not ready:
            return ()
        assert LIBRARY is not None
        tokens = packed_tokens(inputs, out)
        packed = b"".join([step.token for step in ready.values()])
        self._state = RUNNING
        result = LIBRARY.kv_step_packed(packed, len(ready), tokens)
        if result == FAILED:
            raise MemoryError(f"no scratch memory for a step of {len(ready)} sequences")
        if result == UNLIKE:
            self._state = BEGUN
            self.end()
        else:
            self._state = DONE
        return ready.keys()


class ReadyTogether:
    """A step of all sequences of a `PackedLayer`, as a recording makes it. `PackedLayer.end` ends
    it."""

    def __init__(self, layer: PackedLayer, sequences: bytes, count: int, tokens: bytes) -> None:
        self._layer, self._sequences, self._count = layer, sequences, count
        self._tokens = tokens

    def recorded(self) -> tuple[int, bytes]:
        """See `kvkeep.graph.ready.Ready`; likewise the others."""
        addresses = address_of(self._sequences), self._count, address_of(self._tokens)
        return _RECORDED, _CALL.pack(*addresses)

    def begin(self) -> None:
        """`PackedLayer.prepare` has begun."""

    def start(self, running: bool = True) -> None:
        self._layer.note(RUNNING if running else BEGUN)

    def finish(self, result: int) -> bool:
        if result == FAILED:
            self._layer.note(RUNNING)
            raise MemoryError(f"no scratch memory for a step of {self._count} sequences")
        self._layer.note(DONE)
        return True

    def end(self) -> None:
        """`PackedLayer.end` does."""
