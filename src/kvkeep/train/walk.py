"""Gradients of a long text through a cache, one layer and one chunk at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from kvkeep.errors import ShapeError
from kvkeep.files.offload import Kept, Offload
from kvkeep.host import Embedded, Host, Layerwise, Specs, per_layer
from kvkeep.layer.layer import LayerCache
from kvkeep.spec import CacheSpec
from kvkeep.storage.allocate import give_back
from kvkeep.train.autograd import accumulate, reduces
from kvkeep.train.cell import Capture, Captured, Cell, Unattending
from kvkeep.train.chain import Chain
from kvkeep.train.messages import Message, of_gradients, of_slots
from kvkeep.train.passing import Passing, Reading, Recording, Trace, slots_before
from kvkeep.train.replay import Decisions
from kvkeep.train.slots import Slots

CHUNK = 1024

OnLayer = Callable[[int, Tensor, slice], None]
"""Called before a layer runs on a chunk, with its index, input (B, n, width) and columns."""


class Walk:
    """A forward and a backward of texts through a model: an outer loop over layers, an inner loop
    over chunks.

    So only one layer's cache is in memory at a time. For each layer and chunk, the input and the
    recurrent states before it go to `store`, evicted positions to host memory; everything else is
    recomputed. A layer that reads an earlier layer's slots repeats that layer's evictions; the
    earlier layer's keys and values, and their gradients from its readers, are kept for each chunk.
    With several processes (`chain`), `chunks` and `outputs` are this process's; in the backward, a
    process with n processes after it holds the slots of up to n + 1 layers.

    After `forward`, `decisions` has each layer's evictions for `replaying`.

    Raises:
        SpecError: the spec does not exist or does not fit the model.
        ShapeError: `chunk` is not a number of tokens, or exceeds a budget or step.
    """

    def __init__(
        self,
        host: Host,
        decoder: Layerwise,
        spec: Specs,
        chunk: int | None,
        store: Offload,
        chain: Chain,
        on_layer: OnLayer | None = None,
    ) -> None:
        self._decoder, self._store, self._on_layer = decoder, store, on_layer
        tokens, specs = decoder.input_ids.shape[1], per_layer(spec, host.kinds)
        n = fitting(chunk, specs)
        chunks = [slice(a, min(a + n, tokens)) for a in range(0, tokens, n)]
        self.chain, own, self._all = chain, chain.share(len(chunks)), len(chunks)
        self._numbers, self.chunks = list(own), [chunks[c] for c in own]
        self._caches = host.new_cache([one.differentiable() for one in specs]).layers
        for cache in self._caches:
            cache.cursor.readers = 0  # settle at once: `Reading` repeats the slots for readers
        self._carries = decoder.carries
        self._read = {own.reads for own in self._carries if own.reads is not None}
        self._calls: list[Any] = []
        self._leaves: list[list[int]] = []  # by layer, indices of its call's tensors with gradients
        self._call_gradients: list[dict[tuple[int, int], Kept]] = [{} for _ in self.chunks]
        self._traces: dict[int, Trace] = {}  # of layers that gradients reach or other layers read
        self.outputs: list[Kept] = []  # outputs of the last layer, by chunk
        self.decisions: Decisions = []
        draws = any(part.training for part in decoder.model.modules())
        self._seed = chain.agreed(int(torch.randint(2**31, ()))) if draws else None
        devices = {p.device for p in decoder.model.parameters()} | {decoder.input_ids.device}
        self._devices = {device for device in devices if device.type != "cpu"}

    def forward(self, *, trained: bool = True) -> None:
        """Compute the last layer's outputs. `trained`: keep the records for `backward`."""
        self._first = self._lowest_trained() if trained else len(self._carries)
        states = []
        for c, columns in enumerate(self.chunks):
            with torch.no_grad(), self._random(c):
                embedded = self._decoder.embed(columns)
            states.append(self._store.put(embedded.hidden))
            self._calls.append(self._store.put_tree(embedded.calls, {}))
        for index in range(len(self._carries)):
            if self.chunks:
                states = self._layer_forward(index, states)
        self.outputs = states

    def _layer_forward(self, index: int, inputs: list[Kept]) -> list[Kept]:
        """A layer's inputs -> its outputs, by chunk."""
        trace, keeps = Trace(inputs), index >= self._first
        passing = self._passing(index, trace)
        after = []
        for c, columns in enumerate(self.chunks):
            hidden = self._store.get(inputs[c])
            if self._on_layer is not None:
                self._on_layer(index, hidden, columns)
            if keeps:
                trace.marks.append({n: self._store.put(x) for n, x in passing.states.items()})
            step = passing.step(c)
            with torch.no_grad():
                after.append(self._store.put(self._layer(index, c, hidden, step)))
            passing.end(c, step)
            if not keeps:
                self._store.drop(inputs[c])
        if self.chain.behind:
            self.chain.to_next(passing.message()._replace(states=passing.states))
        passing.close()
        if isinstance(passing, Recording):
            self.decisions.append([x for calls in trace.evicted for x in calls])
        if keeps or index in self._read:
            self._traces[index] = trace
        give_back()
        return after

    def _passing(self, index: int, trace: Trace) -> Passing:
        """A layer's forward through this process's chunks."""
        own, start = self._carries[index], self.chunks[0].start
        before = None if self.chain.first else self.chain.from_previous()
        states: dict[str, Tensor] = {} if before is None else {**before.states}
        if own.slots is None:
            return Passing(states)
        cache, store, text = self._caches[own.slots], self._store, self._decoder
        if own.reads is not None:
            read = self._traces[own.reads]
            return Reading(cache, read, store, text, self.chunks, before)
        passing = Recording(cache, trace, store, states, read=index in self._read)
        if before is not None:
            passing.restore(before, text, start)
        return passing

    def backward(self, gradients: list[Kept]) -> None:
        """Add the gradients of all parameters, given the gradients of the last layer's outputs."""
        if not self.chunks:
            return
        for index, slots, given in self._with_slots():
            gradients = self._layer_backward(index, gradients, slots, given)
            give_back()
        if self._first:
            return
        for c, columns in enumerate(self.chunks):
            with torch.enable_grad(), self._random(c):
                embedded = self._decoder.embed(columns)
            gradient = self._store.take(gradients[c])
            self._embedding_backward(c, embedded, gradient, last=c == len(self.chunks) - 1)

    def _with_slots(self) -> Iterator[tuple[int, Carried, Message | None]]:
        """For each layer, from the last to the first: its index, its `Carried` after this process's
        chunks, and the gradients of these slots and states from later processes. Before it resumes,
        the caller must take `Carried` back to the state before these chunks, with its gradients.

        Slots are computed from the first process to the last, gradients from the last to the first.
        So a process with n processes after it computes the slots of n layers ahead. Otherwise every
        layer would wait for a whole pass along the chain.
        """
        chain = self.chain
        indices = range(len(self._carries) - 1, self._first - 1, -1)
        to_come = 0 if chain.first else len(indices)  # messages yet to receive from the previous
        arrived, waiting, ahead = deque[Message](), iter(indices), deque[Slots | None]()

        def compute() -> Message | None:
            """Compute the slots of the next layer; return the message for the next process."""
            for index in waiting:
                ahead.append(self._replayed(index, None if chain.first else arrived.popleft()))
                return of_slots(ahead[-1]) if chain.behind else None
            return None

        for _ in range(min(chain.behind + 1, len(indices))):
            if to_come:
                arrived.append(chain.from_previous())
                to_come -= 1
            if len(ahead) < chain.behind and (message := compute()):
                chain.to_next(message)
        for index in indices:
            message = compute()
            given = chain.swap_with_next(message) if chain.behind else None
            carried = Carried(ahead.popleft())
            yield index, carried, given
            if not chain.first:
                gradients = of_gradients(carried.slots)._replace(states=carried.states)
                found = chain.swap_with_previous(gradients, bool(to_come))
                if found is not None:
                    arrived.append(found)
                    to_come -= 1

    def _layer_backward(
        self, index: int, gradients: list[Kept], carried: Carried, given: Message | None
    ) -> list[Kept]:
        """Gradients of a layer's outputs -> gradients of its inputs, by chunk. Adds the gradients
        of its parameters. Removes the outputs' gradients and the inputs from `store`."""
        trace, slots = self._traces[index], carried.slots
        found: list[Kept] = []
        own: tuple[Tensor, ...] = ()  # gradients of the chunk's keys and values from later chunks
        if given is not None:
            carried.states = {**given.states}
            if slots is not None:
                slots.absorb(*given.tensors.values())
                own = slots.pop()
        for c in reversed(range(len(self.chunks))):
            hidden = self._store.take(trace.inputs[c]).detach().requires_grad_()
            marks = {name: self._store.take(x).detach() for name, x in trace.marks[c].items()}
            states = {name: x.requires_grad_(x.is_floating_point()) for name, x in marks.items()}
            step = self._backward_step(index, c, slots, dict(states))
            call, leaves = self._call_with_leaves(index, c)
            with torch.enable_grad():
                out = self._layer(index, c, hidden, step, call)
            ends = [(out, self._store.take(gradients[c]))]
            ends += [(step.states[name], g) for name, g in carried.states.items()]
            if step.written:
                ends += zip(step.written, self._by_readers(trace, c, own), strict=False)
            reduces(self._decoder.layers[index], not c)
            _accumulate(ends)
            assert hidden.grad is not None
            found.append(self._store.put(hidden.grad))
            carried.states = {name: x.grad for name, x in states.items() if x.grad is not None}
            for leaf, x in leaves.items():
                if x.grad is not None:
                    self._call_gradients[c][index, leaf] = self._store.put(x.grad)
            if step.shared is not None:
                self._add_for_owner(index, c, own, step.shared)
            if step.past is not None:
                assert slots is not None
                slots.absorb(step.past.keys.grad, step.past.values.grad)
                own = slots.pop()
        return found[::-1]

    def _backward_step(
        self, index: int, c: int, slots: Slots | None, states: dict[str, Tensor]
    ) -> Unattending:
        """The `ChunkStep` for a chunk, with gradients."""
        own, start = self._carries[index], self.chunks[c].start
        if own.slots is None or slots is None:
            return Unattending(states)
        pair = None if own.reads is None else self._traces[own.reads].pair(c, self._store)
        past = slots.past if start else None
        return Cell(self._caches[own.slots], past, self._decoder.history(start), states, pair)

    def _by_readers(self, trace: Trace, c: int, own: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Gradients of a chunk's keys and values: `own`, from later chunks, plus the gradients from
        the layers that read them."""
        if c not in trace.pair_gradients:
            return own
        by_readers = tuple(self._store.take(x) for x in trace.pair_gradients.pop(c))
        return tuple(map(torch.add, own, by_readers)) if own else by_readers

    def _add_for_owner(
        self, index: int, c: int, own: tuple[Tensor, ...], shared: tuple[Tensor, Tensor]
    ) -> None:
        """Add a reader's gradients of a chunk's keys and values to the trace of the layer that it
        reads. `own`: gradients from later chunks."""
        read = self._carries[index].reads
        assert read is not None
        trace = self._traces[read]
        here = tuple(torch.zeros_like(x) if x.grad is None else x.grad for x in shared)
        here = tuple(map(torch.add, own, here)) if own else here
        sums = self._by_readers(trace, c, here)
        trace.pair_gradients[c] = tuple(map(self._store.put, sums))

    def _replayed(self, index: int, before: Message | None) -> Slots | None:
        """A layer's slots after this process's chunks, in the last process before the text's last
        chunk, with the records by which `pop` undoes each chunk; None: the layer does not attend.
        `before`: the previous process's slots."""
        own = self._carries[index]
        if own.slots is None:
            return None
        cache, written = self._caches[own.slots], index if own.reads is None else own.reads
        trace = self._traces[written]
        slots = slots_before(cache, trace, self._store, before)
        for c in range(len(self.chunks) - (not self.chain.behind)):
            if trace.pairs:
                k, v = trace.pair(c, self._store)
                position = self._decoder.positions(self.chunks[c])
            else:
                k, v, position = self._captured(index, c, cache)
            slots.push(k, v, position, trace.evicted[c + 1])
        return slots

    def _captured(self, index: int, c: int, cache: LayerCache) -> tuple[Tensor, Tensor, Tensor]:
        """The keys, values and positions of a chunk, recomputed."""
        trace = self._traces[index]
        states = {name: self._store.get(x) for name, x in trace.marks[c].items()}
        try:
            with torch.no_grad():
                hidden = self._store.get(trace.inputs[c])
                self._layer(index, c, hidden, Capture(cache, states))
        except Captured as captured:
            return captured.found
        raise RuntimeError("a layer did not attend")

    def _call_with_leaves(self, index: int, c: int) -> tuple[Any, dict[int, Tensor]]:
        """A layer's call for a chunk, and its tensors that need gradients, by index."""
        call = self._store.get_tree(self._calls[c][index])
        flat, structure = tree_flatten(call)
        leaves = {leaf: flat[leaf].detach().requires_grad_() for leaf in self._leaves[index]}
        return tree_unflatten([leaves.get(i, x) for i, x in enumerate(flat)], structure), leaves

    def _embedding_backward(
        self, c: int, embedded: Embedded, gradient: Tensor, *, last: bool
    ) -> None:
        """Add the gradients of the parameters before the first layer, given the gradients of its
        input and of the layers' calls. `last`: no further call follows."""
        ends = [(embedded.hidden, gradient), *((x, torch.zeros_like(x)) for x in embedded.outputs)]
        for (index, leaf), kept in self._call_gradients[c].items():
            ends.append((tree_flatten(embedded.calls[index])[0][leaf], self._store.take(kept)))
        reduces(self._decoder.model, last, recurse=False)
        _accumulate(ends)

    def _layer(
        self, index: int, c: int, hidden: Tensor, step: Unattending, call: Any = None
    ) -> Tensor:
        # Autocast's cache may hold casts of weights without gradients, or from another graph.
        torch.clear_autocast_cache()
        call = self._store.get_tree(self._calls[c][index]) if call is None else call
        with self._random(c, index):
            return self._decoder.layer(index, self.chunks[c], hidden, call, step)

    def _lowest_trained(self) -> int:
        """Index of the first layer that gradients must reach; 0 if parameters before the layers
        need gradients. Also sets `_leaves`."""
        with torch.enable_grad(), self._random(0):
            embedded = self._decoder.embed(slice(0, 1))
        self._leaves = [
            [i for i, x in enumerate(tree_flatten(call)[0]) if _needs_gradient(x)]
            for call in embedded.calls
        ]
        if embedded.hidden.requires_grad or any(self._leaves):
            return 0
        trained = [any(p.requires_grad for p in x.parameters()) for x in self._decoder.layers]
        return trained.index(True) if any(trained) else len(trained)

    @contextmanager
    def _random(self, c: int, layer: int = -1) -> Iterator[None]:
        """A context in which a layer draws the same random numbers whenever it runs on chunk c. At
        its end torch's generators are restored."""
        kind = next((device.type for device in self._devices), None)
        with torch.random.fork_rng(self._devices, enabled=self._seed is not None, device_type=kind):
            if self._seed is not None:
                number = self._numbers[c] if self._numbers else 0
                # torch.manual_seed also seeds unused devices lazily, and records a traceback for
                # that, which takes a millisecond.
                seed = torch.manual_seed if self._devices else torch.default_generator.manual_seed
                seed(self._seed + (layer + 1) * self._all + number)
            yield


@dataclass
class Carried:
    """A layer's state between two chunks in the backward: its slots with their gradients, if it
    attends, and the gradients of its recurrent states."""

    slots: Slots | None
    states: dict[str, Tensor] = field(default_factory=dict)


def _accumulate(ends: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Accumulate the gradients `g` of the tensors x that require them, for pairs (x, g)."""
    found = [(x, g.to(x.dtype)) for x, g in ends if x.requires_grad]
    if found:
        accumulate([x for x, _ in found], [g for _, g in found])


def _needs_gradient(x: Any) -> bool:
    return isinstance(x, Tensor) and x.requires_grad


def fitting(chunk: int | None, specs: list[CacheSpec]) -> int:
    """Tokens per chunk: `chunk`; None: the smallest of 1,024, all budgets and all steps. A chunk is
    one step, so that its attention is computed at once.

    Raises:
        ShapeError: `chunk` is not a whole number of at least 1, or exceeds a budget or step.
    """
    one = min(specs, key=lambda one: one.policy.budget or CHUNK)
    budget = one.policy.budget or chunk or CHUNK
    stepped = min(specs, key=lambda one: one.policy.step or CHUNK)
    step = stepped.policy.step or chunk or CHUNK
    if chunk is None:
        return min(CHUNK, budget, step)
    if not isinstance(chunk, Integral) or chunk < 1:
        raise ShapeError(f"a chunk of {chunk} tokens; give a whole number of at least 1")
    if chunk > budget:
        raise ShapeError(
            f"a chunk of {chunk} tokens for {one}, which keeps {budget}: a chunk cannot be larger "
            f"than the budget; use chunk={budget} or less, or a larger budget"
        )
    if chunk > step:
        raise ShapeError(
            f"a chunk of {chunk} tokens for {stepped}, which makes steps of {step}; for gradients "
            f"each chunk is one step: use chunk={step} or less, or step={chunk}"
        )
    return int(chunk)
