"""PackedLayer: a layer in a packed forward, which lays the tokens of several sequences side by
side."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import ExitStack
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from kvkeep.attention import Attend, dispatch_several, several_at_once
from kvkeep.checks import wants_gradients
from kvkeep.errors import UnsupportedError
from kvkeep.layer.attending import AttendingLayer
from kvkeep.layer.cursor import Cursor
from kvkeep.layer.decode.plan import FAILED, UNLIKE
from kvkeep.layer.decode.ready import NOT_MADE, RAISED, Ready, require_memory
from kvkeep.layer.decode.records import SEQUENCE, Kind, kind_of, step_tokens
from kvkeep.layer.layer import LayerCache
from kvkeep.layer.sight import Sighted
from kvkeep.layer.step import Phases, StepInputs, finished, require_causal
from kvkeep.native_library import LIBRARY


class SequencePart(NamedTuple):
    """A layer of one sequence's cache, and the sequence's tokens in the forward: `first` is the
    index of the first one, `tokens` their number."""

    layer: LayerCache
    first: int
    tokens: int

    def of(self, x: Tensor) -> Tensor:
        """The sequence's part of a tensor (..., tokens, width)."""
        return x[..., self.first : self.first + self.tokens, :]


class PackedLayer(AttendingLayer):
    """Runs each sequence's own layer on its range of the tokens. Decode steps that the native
    library supports become one call, whose threads share the work of all sequences.

    Args:
        layers: this layer of each sequence's cache, empty or with one row.
        counts: number of tokens of each sequence, in order.
    """

    def __init__(self, layers: Sequence[LayerCache], counts: Sequence[int]) -> None:
        firsts = accumulate(counts, initial=0)
        self.parts = [*map(SequencePart, layers, firsts, counts)]
        self._tokens = sum(counts)
        self.window, self._readers = layers[0].window, layers[0].cursor.readers
        self._ready: dict[int, Ready] = {}  # prepared steps by the index of their sequence
        self._result = NOT_MADE  # result of the native call that makes them

    def __len__(self) -> int:
        """Number of sequences."""
        return len(self.parts)

    def next_positions(self, n: int, device: torch.device, real: Tensor | None = None) -> Tensor:
        """Positions of the tokens, each within its own sequence: int32 (n,)."""
        if n != self._tokens or real is not None:
            raise UnsupportedError(
                f"a packed forward of {self._tokens} tokens asks for positions of {n}; the model "
                "divides or pads the tokens, so feed the sequences one by one"
            )
        return torch.cat([layer.next_positions(count, device) for layer, _, count in self.parts])

    def prepare(self) -> None:
        """Prepare the steps that the native library can make. Their layers stay locked until `end`.

        All layers are prepared before the first one runs; see `Ready`. Only a layer to whose
        slots other layers attend is prepared in `run`, because its step must end before they run.

        Raises:
            StateError: another thread is changing a layer.
        """
        if not self._readers:
            self._prepare()

    def _prepare(self) -> None:
        for sequence, (layer, first, count) in enumerate(self.parts):
            plan = layer.plan
            if count == 1 and plan is not None and plan.ready():
                step = self._ready[sequence] = Ready(plan, first, sequence + 1)
                step.begin()

    def end(self) -> None:
        """Count the tokens of the steps that the native library made. Return all other prepared
        layers to their state before `prepare`."""
        with ExitStack() as ended:  # end every layer, even if one raises
            while self._ready:
                ended.callback(self._ready.popitem()[1].end, self._result)

    def sighted(self, queries: Tensor) -> Sighted:
        """See `LayerCache.sighted`; tokens of other sequences are not visible."""
        own = queries.flatten()
        return Sighted.joined([x.sighted(own[first : first + n]) for x, first, n in self.parts])

    def run(self, inputs: StepInputs) -> Tensor:
        """Attention of all tokens: (1, Hq, n, Dv); see `LayerCache.run`."""
        require_causal(inputs)
        q, v = inputs.q, inputs.v
        # In memory the heads of a token lie side by side, as the model's next layer reads them.
        out = q.new_empty(1, q.shape[2], q.shape[1], v.shape[3]).transpose(1, 2)
        made = self._run_together(inputs, out) or self._attend_together(inputs, out)
        for sequence, part in enumerate(self.parts):
            if sequence not in made:
                part.of(out).copy_(part.layer.run(inputs.part(part.first, part.tokens)))
        return out

    @property
    def cursor(self) -> Cursor:
        """The cursor of the sequence to whose slots most layers have yet to attend."""
        return max((part.layer.cursor for part in self.parts), key=lambda x: x.unread)

    def read(self, inputs: StepInputs, attend: Attend | None = None) -> Tensor:
        """Attention of a layer that has no slots and reads this layer's; see `LayerCache.read`.

        Raises:
            UnsupportedError: some tokens have no query.
        """
        if inputs.q.shape[2] != self._tokens:
            raise UnsupportedError(
                f"in a packed forward of {self._tokens} tokens, a layer that reads another layer's "
                f"slots has queries of only {inputs.q.shape[2]}; feed the sequences one by one"
            )
        read = [layer.read(inputs.part(first, count), attend) for layer, first, count in self.parts]
        return torch.cat(read, dim=2)

    def _attend_together(self, inputs: StepInputs, out: Tensor) -> Collection[int]:
        """Make the steps of all sequences with one token, if a backend can compute their attention
        in one call; return the indices of the sequences."""
        singles = [sequence for sequence, part in enumerate(self.parts) if part.tokens == 1]
        if len(singles) < 2 or not several_at_once(inputs.q):
            return ()
        phases: list[Phases] = []
        try:
            calls = []
            for sequence in singles:
                layer, first, _ = self.parts[sequence]
                phases.append(layer.writer.phases(inputs.part(first, 1)))
                calls.append(next(phases[-1]))
            found = dispatch_several(calls)
            for sequence, step, result in zip(singles, phases, found, strict=True):
                self.parts[sequence].of(out).copy_(finished(step, result))
        finally:
            for step in phases:
                step.close()  # undoes a step that did not finish
        return singles

    def prepared(self) -> ReadyTogether | None:
        """The steps of all sequences as one native call; None: some sequence has no prepared step,
        or needs its inputs first, or the sequences take inputs of different kinds."""
        ready = [*self._ready.values()]
        if len(ready) < len(self.parts) or any(
            x.plan.looks or x.plan.kind is not ready[0].plan.kind for x in ready
        ):
            return None
        return ReadyTogether(self, ready)

    def note(self, result: int) -> None:
        """Record the result of the native call of the prepared steps."""
        self._result = result

    def _run_together(self, inputs: StepInputs, out: Tensor) -> Collection[int]:
        """Make the prepared steps by one native call; return the indices of their sequences. Steps
        prepared for inputs of another kind are dropped."""
        if not self._readers:
            return self._run_prepared(inputs, out)
        try:
            self._prepare()
            return self._run_prepared(inputs, out)
        finally:
            self.end()

    def _run_prepared(self, inputs: StepInputs, out: Tensor) -> Collection[int]:
        ready = self._ready
        if not ready:
            return ()
        kind: Kind | None = kind_of(inputs)
        if wants_gradients(*inputs[:3]) or inputs.special:
            kind = None
        for sequence in [x for x, step in ready.items() if step.plan.kind is not kind]:
            ready.pop(sequence).end(NOT_MADE)
        if not ready:
            return ()
        assert LIBRARY is not None
        made = tuple(ready)
        sequences = b"".join(
            [
                step.given(inputs.part(self.parts[x].first, 1))
                if step.plan.looks
                else step.sequences
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
    """One prepared step of all sequences of a `PackedLayer`. The layer begins and ends it. See
    `Ready`."""

    def __init__(self, layer: PackedLayer, steps: Sequence[Ready]) -> None:
        self._layer = layer
        self.sequences = b"".join([x.sequences for x in steps])
        self.count = len(self.sequences) // SEQUENCE.size
        self.rows, self.kind = len(steps), steps[0].kind

    def begin(self) -> None:
        """Nothing to do: `PackedLayer.prepare` has begun the steps."""

    def end(self, result: int) -> None:
        """See `Ready`. If the program did not make the step, `PackedLayer.run` may have made
        it and recorded its result."""
        if result not in (NOT_MADE, RAISED):
            self._layer.note(result)
