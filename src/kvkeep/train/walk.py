"""Gradients of a long text through a cache, one layer and one chunk at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from kvkeep.errors import ShapeError
from kvkeep.files.offload import Kept, Offload
from kvkeep.host import Embedded, Host, LayerStep, Layerwise, Specs, per_layer
from kvkeep.layer.layer import LayerCache
from kvkeep.spec import CacheSpec
from kvkeep.storage.allocate import give_back
from kvkeep.train.autograd import accumulate, reduces
from kvkeep.train.cell import Capture, Captured, Cell, Recorder
from kvkeep.train.chain import (
    Chain,
    Message,
    layer_state,
    of_gradients,
    of_layer,
    of_slots,
    slots_from,
)
from kvkeep.train.replay import Decisions
from kvkeep.train.slots import Slots

CHUNK = 1024

OnLayer = Callable[[int, Tensor, slice], None]
"""Called before a layer runs on a chunk, with its index, input (B, n, width) and columns."""


class Walk:
    """A forward and a backward of texts through a model: an outer loop over layers, an inner over
    chunks.

    So only one layer's cache is in memory at a time. Each layer's input for each chunk goes to
    `store`, and the positions that its policy evicted to host memory; all else is recomputed. With
    several processes (`chain`), each has some of the chunks, and `chunks` and `outputs` are its
    own; in the backward, a process with n processes after it holds the slots of up to n + 1 layers.

    After `forward`, `decisions` has each layer's evictions, call by call, for `replaying`.

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
        self._calls: list[Any] = []
        self._inputs: list[list[Kept]] = []  # by layer that gradients reach, then by chunk
        self._evicted: list[list[list[Tensor]]] = []
        self.outputs: list[Kept] = []  # outputs of the last layer, by chunk
        self.decisions: Decisions = []
        draws = any(part.training for part in decoder.model.modules())
        self._seed = chain.agreed(int(torch.randint(2**31, ()))) if draws else None
        devices = {p.device for p in decoder.model.parameters()} | {decoder.input_ids.device}
        self._devices = {device for device in devices if device.type != "cpu"}

    def forward(self, *, trained: bool = True) -> None:
        """Compute the last layer's outputs. `trained`: keep the inputs of `backward`."""
        self._first = self._lowest_trained() if trained else len(self._caches)
        states = []
        for c, columns in enumerate(self.chunks):
            with torch.no_grad(), self._random(c):
                embedded = self._decoder.embed(columns)
            states.append(self._store.put(embedded.hidden))
            self._calls.append(self._store.put_tree(embedded.calls, {}))
        for index, cache in enumerate(self._caches):
            if self.chunks:
                states = self._layer_forward(index, cache, states)
        self.outputs = states

    def _layer_forward(self, index: int, cache: LayerCache, states: list[Kept]) -> list[Kept]:
        """A layer's inputs -> its outputs, one per chunk."""
        if not self.chain.first:
            before = self._decoder.history(self.chunks[0].start)
            cache.cursor.evicted = []  # while evictions are recorded, rows are not parted
            cache.restore(layer_state(self.chain.from_previous(), before))
        evicted: list[list[Tensor]] = [[]]  # before the first chunk, then after each chunk
        after = []
        for c, columns in enumerate(self.chunks):
            hidden = self._store.get(states[c])
            if self._on_layer is not None:
                self._on_layer(index, hidden, columns)
            step = Recorder(cache)
            with torch.no_grad():
                after.append(self._store.put(self._layer(index, c, hidden, step)))
            evicted[-1] += [x.cpu() for x in step.before]
            evicted.append([x.cpu() for x in step.after])
            if index < self._first:
                self._store.drop(states[c])
        if self.chain.behind:
            self.chain.to_next(of_layer(cache.state()))
        cache.reset()
        self.decisions.append([x for calls in evicted for x in calls])
        if index >= self._first:
            self._inputs.append(states)
            self._evicted.append(evicted)
        give_back()
        return after

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
            if embedded.hidden.requires_grad:
                self._embedding_backward(embedded, gradient, last=c == len(self.chunks) - 1)

    def _with_slots(self) -> Iterator[tuple[int, Slots, Iterable[Tensor]]]:
        """For each layer, from the last to the first: its index, its slots after this process's
        chunks, and their gradients from later chunks, (B, H, S, D) for keys and values. When the
        caller resumes, the slots must be those before these chunks, with their gradients.

        Slots are computed from the first process to the last, gradients from the last to the first.
        So a process with n processes after it computes the slots of n layers ahead. Otherwise every
        layer would wait for a whole pass along the chain.
        """
        chain = self.chain
        indices = range(len(self._caches) - 1, self._first - 1, -1)
        to_come = 0 if chain.first else len(indices)  # messages due from the previous process
        arrived, waiting, ahead = deque[Message](), iter(indices), deque[Slots]()

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
            given = chain.swap_with_next(message).tensors.values() if chain.behind else ()
            slots = ahead.popleft()
            yield index, slots, given
            if not chain.first:
                found = chain.swap_with_previous(of_gradients(slots), bool(to_come))
                if found is not None:
                    arrived.append(found)
                    to_come -= 1

    def _layer_backward(
        self, index: int, gradients: list[Kept], slots: Slots, given: Iterable[Tensor]
    ) -> list[Kept]:
        """Gradients of a layer's outputs -> gradients of its inputs, one per chunk. Adds the
        gradients of its parameters. The given gradients and the inputs are removed from `store`."""
        cache, inputs = self._caches[index], self._inputs.pop()
        found: list[Kept] = []
        own: tuple[Tensor, ...] = ()  # gradients of the chunk's keys and values from later chunks
        if self.chain.behind:
            slots.absorb(*given)
            own = slots.pop()
        for c in reversed(range(len(self.chunks))):
            hidden = self._store.take(inputs[c]).detach().requires_grad_()
            before = self._decoder.history(self.chunks[c].start)
            cell = Cell(cache, slots.past if self.chunks[c].start else None, before)
            with torch.enable_grad():
                out = self._layer(index, c, hidden, cell)
            results = zip(
                (out, cell.keys, cell.values), (self._store.take(gradients[c]), *own), strict=False
            )
            ends = [(x, g.to(x.dtype)) for x, g in results if x.requires_grad]
            reduces(self._decoder.layers[index], not c)
            accumulate([x for x, _ in ends], [g for _, g in ends])
            assert hidden.grad is not None
            found.append(self._store.put(hidden.grad))
            if cell.past is not None:
                slots.absorb(cell.past.keys.grad, cell.past.values.grad)
                own = slots.pop()
        return found[::-1]

    def _replayed(self, index: int, before: Message | None) -> Slots:
        """The layer's slots after this process's chunks, or before the text's last chunk, with the
        records that `pop` needs to undo each chunk. `before`: the previous process's slots."""
        cache, evicted = self._caches[index], self._evicted.pop()
        if before is None:
            slots = Slots(self._store, cache)
        else:
            slots = slots_from(before, self._store, cache)
            slots.evict(evicted[0])
        inputs = self._inputs[index - self._first]
        for c in range(len(self.chunks) - (not self.chain.behind)):
            try:
                with torch.no_grad():
                    self._layer(index, c, self._store.get(inputs[c]), Capture(cache))
            except Captured as captured:
                k, v, position = captured.found
            slots.push(k, v, position, evicted[c + 1])
        return slots

    def _embedding_backward(self, embedded: Embedded, gradient: Tensor, *, last: bool) -> None:
        """Add the gradients of the parameters before the first layer, given its input's gradient.
        `last`: no further call follows."""
        others = embedded.outputs
        reduces(self._decoder.model, last, recurse=False)
        accumulate([embedded.hidden, *others], [gradient, *map(torch.zeros_like, others)])

    def _layer(self, index: int, c: int, hidden: Tensor, step: LayerStep) -> Tensor:
        # Autocast may have cached casts of the weights without gradients, or from another graph.
        torch.clear_autocast_cache()
        call = self._store.get_tree(self._calls[c][index])
        with self._random(c, index):
            return self._decoder.layer(index, self.chunks[c], hidden, call, step)

    def _lowest_trained(self) -> int:
        """Index of the first layer that gradients must reach; 0 if the embedding needs them too."""
        with torch.enable_grad(), self._random(0):
            if self._decoder.embed(slice(0, 1)).hidden.requires_grad:
                return 0
        trained = [any(p.requires_grad for p in x.parameters()) for x in self._decoder.layers]
        return trained.index(True) if any(trained) else len(trained)

    @contextmanager
    def _random(self, c: int, layer: int = -1) -> Iterator[None]:
        """A context in which this layer draws the same random numbers whenever it runs on this
        chunk; the generators outside are unchanged."""
        kind = next((device.type for device in self._devices), None)
        with torch.random.fork_rng(self._devices, enabled=self._seed is not None, device_type=kind):
            if self._seed is not None:
                number = self._numbers[c] if self._numbers else 0
                # torch.manual_seed also notes a seed for devices that were never used, with a
                # traceback, which takes a millisecond.
                seed = torch.manual_seed if self._devices else torch.default_generator.manual_seed
                seed(self._seed + (layer + 1) * self._all + number)
            yield


def fitting(chunk: int | None, specs: list[CacheSpec]) -> int:
    """Tokens per chunk: `chunk`, or by default the smallest of 1,024, the budgets and the steps. A
    chunk is one step, so that its attention is computed at once.

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
            f"a chunk of {chunk} tokens for {stepped}, which makes steps of {step}; gradients take "
            f"one step for each chunk: use chunk={step} or less, or step={chunk}"
        )
    return int(chunk)
