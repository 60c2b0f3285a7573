"""PackedLayer: one layer of several sequences, whose tokens are packed in one row."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import ExitStack
from itertools import accumulate

import torch
from torch import Tensor

from kvkeep.attention import dispatch_several, several_at_once
from kvkeep.checks import wants_gradients
from kvkeep.errors import UnsupportedError
from kvkeep.layer.attending import AttendingLayer
from kvkeep.layer.layer import LayerCache
from kvkeep.layer.plan import FAILED, UNLIKE, Kind, kind_of
from kvkeep.layer.ready import NOT_MADE, RAISED, Ready, require_memory
from kvkeep.layer.records import SEQUENCE, step_tokens
from kvkeep.layer.step import Phases, StepInputs, finished, require_causal
from kvkeep.native_library import LIBRARY


class PackedLayer(AttendingLayer):
    """Runs each sequence's own layer on its range of the tokens. Decode steps that the native
    library supports become one call, whose threads share the work of all sequences.

    Args:
        layers: this layer of each sequence's cache, empty or with one row.
        counts: number of tokens of each sequence, in order.
    """

    def __init__(self, layers: Sequence[LayerCache], counts: Sequence[int]) -> None:
        self._layers, self._counts = layers, counts
        self.window = layers[0].window
        self._ready: dict[int, Ready] = {}  # by the sequence
        self._result = NOT_MADE  # of their call

    def __len__(self) -> int:
        """Number of sequences."""
        return len(self._layers)

    def next_positions(self, n: int, device: torch.device, real: Tensor | None = None) -> Tensor:
        """Positions of the tokens, each within its own sequence: int32 (n,)."""
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
        """Prepare the steps that the native library can make. Their layers stay locked until `end`.

        All layers are prepared before the first one runs: running weights evict Python's working
        set from the processor's caches, which makes later Python several times slower.

        Raises:
            StateError: another thread is changing a layer.
        """
        first = 0
        for sequence, (layer, count) in enumerate(zip(self._layers, self._counts, strict=True)):
            plan = layer.next_plan() if count == 1 else None
            if plan is not None:
                step = self._ready[sequence] = Ready(plan, first, sequence + 1)
                step.begin()
            first += count

    def end(self) -> None:
        """Count the tokens of the steps that the native library made, and return all other prepared
        layers to their state before `prepare`."""
        with ExitStack() as ended:  # end every layer, even if one raises
            while self._ready:
                ended.callback(self._ready.popitem()[1].end, self._result)

    def run(self, inputs: StepInputs) -> Tensor:
        """Attention of all tokens: (1, Hq, n, Dv); see `LayerCache.run`."""
        require_causal(inputs)
        q, v = inputs.q, inputs.v
        # The layout that models use next: the heads of a token side by side.
        out = q.new_empty(1, q.shape[2], q.shape[1], v.shape[3]).transpose(1, 2)
        made = self._run_together(inputs, out) or self._attend_together(inputs, out)
        first = 0
        for sequence, (layer, count) in enumerate(zip(self._layers, self._counts, strict=True)):
            if sequence not in made:
                out[:, :, first : first + count] = layer.run(inputs.part(first, count))
            first += count
        return out

    def _attend_together(self, inputs: StepInputs, out: Tensor) -> Collection[int]:
        """Make the single-token steps, with one attention call for all if a backend supports it;
        return the indices of their sequences."""
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
                step.close()  # undoes a step that did not finish
        return singles

    def prepared(self) -> ReadyTogether | None:
        """The steps of all sequences as one native call; None: some sequence is not ready, or the
        sequences need different inputs."""
        ready = [*self._ready.values()]
        if len(ready) < len(self._layers) or any(
            x.plan.looks or x.plan.kind is not ready[0].plan.kind for x in ready
        ):
            return None
        return ReadyTogether(self, ready)

    def note(self, result: int) -> None:
        """Record the result of the native call of the prepared steps."""
        self._result = result

    def _run_together(self, inputs: StepInputs, out: Tensor) -> Collection[int]:
        """Make the prepared steps by one native call; return their sequences. Steps prepared for
        other inputs are dropped."""
        ready = self._ready
        if not ready:
            return ()
        kind: Kind | None = kind_of(inputs)
        if wants_gradients(*inputs[:3]) or inputs.sinks is not None:
            kind = None
        for sequence in [x for x, step in ready.items() if step.plan.kind is not kind]:
            ready.pop(sequence).end(NOT_MADE)
        if not ready:
            return ()
        assert LIBRARY is not None
        first, made = list(accumulate(self._counts, initial=0)), tuple(ready)
        sequences = b"".join(
            [
                step.given(inputs.part(first[x], 1)) if step.plan.looks else step.sequences
                for x, step in ready.items()
            ]
        )
        tokens = step_tokens(inputs, out)
        self._result = FAILED  # if the call is interrupted
        self._result = LIBRARY.kv_step(sequences, len(sequences) // SEQUENCE.size, tokens)
        require_memory(self._result, len(made))
        if self._result == UNLIKE:
            self.end()
            return ()
        return made


class ReadyTogether:
    """One prepared step of all sequences of a `PackedLayer`, which the layer has begun and ends.
    See `PreparedStep`."""

    def __init__(self, layer: PackedLayer, steps: Sequence[Ready]) -> None:
        self._layer = layer
        self.sequences = b"".join([x.sequences for x in steps])
        self.count = len(self.sequences) // SEQUENCE.size
        self.rows, self.kind = len(steps), steps[0].kind

    def begin(self) -> None:
        """Nothing to do: `PackedLayer.prepare` has begun the steps."""

    def end(self, result: int) -> None:
        """See `PreparedStep`. If the program did not make the step, `PackedLayer.run` may have."""
        if result not in (NOT_MADE, RAISED):
            self._layer.note(result)
