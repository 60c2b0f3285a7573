"""Gradients of a long text through a cache, one layer and one chunk at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
from kvkeep.train.replay import Decisions
from kvkeep.train.slots import Slots

CHUNK = 1024

OnLayer = Callable[[int, Tensor, slice], None]
"""Called before a layer runs on a chunk: its index, its input (B, n, width), its columns."""


class Walk:
    """A forward and a backward of texts through a model: layers outermost, chunks within.

    So one layer's cache is held at a time. Each layer's input for each chunk is kept in `store`,
    the positions that its policy evicted in host memory; everything else is computed again.

    After `forward`, `decisions` are each layer's evictions, call by call, for `replaying`.

    Raises:
        SpecError: the spec does not exist or does not fit the model.
        ShapeError: `chunk` is not a number of tokens, or exceeds a budget.
    """

    def __init__(
        self,
        host: Host,
        decoder: Layerwise,
        spec: Specs,
        chunk: int | None,
        store: Offload,
        on_layer: OnLayer | None = None,
    ) -> None:
        self._decoder, self._store, self._on_layer = decoder, store, on_layer
        tokens, specs = decoder.input_ids.shape[1], per_layer(spec, host.kinds)
        n = _fitting(chunk, specs)
        self.chunks = [slice(a, min(a + n, tokens)) for a in range(0, tokens, n)]
        self._caches = host.new_cache([one.differentiable() for one in specs]).layers
        self._calls: list[Any] = []
        self._inputs: list[list[Kept]] = []  # by layer that gradients reach, then by chunk
        self._evicted: list[list[list[Tensor]]] = []
        self.outputs: list[Kept] = []  # of the last layer, by chunk
        self.decisions: Decisions = []
        draws = any(part.training for part in decoder.model.modules())
        self._seed = int(torch.randint(2**31, ())) if draws else None
        self._devices = {p.device for p in decoder.model.parameters() if not p.is_cpu}

    def forward(self, *, trained: bool = True) -> None:
        """Compute the last layer's outputs. With `trained`, keep what `backward` needs."""
        self._first = self._lowest_trained() if trained else len(self._caches)
        states = []
        for c, columns in enumerate(self.chunks):
            with torch.no_grad(), self._random(c):
                embedded = self._decoder.embed(columns)
            states.append(self._store.put(embedded.hidden))
            self._calls.append(self._store.put_tree(embedded.calls, {}))
        for index, cache in enumerate(self._caches):
            evicted: list[list[Tensor]] = []
            after = []
            for c in range(len(self.chunks)):
                hidden = self._store.get(states[c])
                if self._on_layer is not None:
                    self._on_layer(index, hidden, self.chunks[c])
                step = Recorder(cache)
                with torch.no_grad():
                    after.append(self._store.put(self._layer(index, c, hidden, step)))
                if c:
                    evicted[-1] += [x.cpu() for x in step.before]
                evicted.append([x.cpu() for x in step.after])
                if index < self._first:
                    self._store.drop(states[c])
            cache.reset()
            self.decisions.append([x for calls in evicted for x in calls])
            if index >= self._first:
                self._inputs.append(states)
                self._evicted.append(evicted)
            states = after
            give_back()
        self.outputs = states

    def backward(self, gradients: list[Kept]) -> None:
        """Add the gradients of all parameters, given those of the last layer's outputs by chunk."""
        for index in reversed(range(self._first, len(self._caches))):
            gradients = self._layer_backward(index, gradients)
            give_back()
        if self._first:
            return
        for c, columns in enumerate(self.chunks):
            with torch.enable_grad(), self._random(c):
                embedded = self._decoder.embed(columns)
            gradient = self._store.take(gradients[c])
            if embedded.hidden.requires_grad:
                self._embedding_backward(embedded, gradient, last=c == len(self.chunks) - 1)

    def _embedding_backward(self, embedded: Embedded, gradient: Tensor, *, last: bool) -> None:
        """Add the gradients of the parameters before the first layer, given that of its input.
        `last`: no other chunk follows."""
        others = embedded.outputs
        reduces(self._decoder.model, last, recurse=False)
        accumulate([embedded.hidden, *others], [gradient, *map(torch.zeros_like, others)])

    def _layer_backward(self, index: int, gradients: list[Kept]) -> list[Kept]:
        """Gradients of a layer's outputs -> those of its inputs, by chunk. Adds those of its
        parameters. The given gradients and the inputs are removed from `store`."""
        cache, inputs = self._caches[index], self._inputs.pop()
        slots = self._replayed(cache, inputs, self._evicted.pop(), index)
        found: list[Kept] = []
        own: tuple[Tensor, ...] = ()  # gradients of the chunk's keys and values from later chunks
        for c in reversed(range(len(self.chunks))):
            hidden = self._store.take(inputs[c]).detach().requires_grad_()
            before = self._decoder.history(self.chunks[c].start)
            cell = Cell(cache, slots.past if c else None, before)
            with torch.enable_grad():
                out = self._layer(index, c, hidden, cell)
            given = self._store.take(gradients[c]), *own
            results = zip((out, cell.keys, cell.values), given, strict=False)
            ends = [(x, g.to(x.dtype)) for x, g in results if x.requires_grad]
            reduces(self._decoder.layers[index], not c)
            accumulate([x for x, _ in ends], [g for _, g in ends])
            assert hidden.grad is not None
            found.append(self._store.put(hidden.grad))
            if cell.past is not None:
                slots.absorb(cell.past.keys.grad, cell.past.values.grad)
                own = slots.pop()
        return found[::-1]

    def _replayed(
        self, cache: LayerCache, inputs: list[Kept], evicted: list[list[Tensor]], index: int
    ) -> Slots:
        """The slots that the layer holds before the last chunk, with what `pop` needs to undo each
        chunk before it."""
        slots = Slots(self._store, cache)
        for c in range(len(self.chunks) - 1):
            try:
                with torch.no_grad():
                    self._layer(index, c, self._store.get(inputs[c]), Capture(cache))
            except Captured as captured:
                k, v, position = captured.found
            slots.push(k, v, position, evicted[c])
        return slots

    def _layer(self, index: int, c: int, hidden: Tensor, step: LayerStep) -> Tensor:
        # Autocast may have cached weights that were cast without gradients, or in another graph.
        torch.clear_autocast_cache()
        call = self._store.get_tree(self._calls[c][index])
        with self._random(c, index):
            return self._decoder.layer(index, self.chunks[c], hidden, call, step)

    def _lowest_trained(self) -> int:
        """The first layer that gradients must reach; 0 if the embedding needs them too."""
        with torch.enable_grad(), self._random(0):
            if self._decoder.embed(slice(0, 1)).hidden.requires_grad:
                return 0
        trained = [any(p.requires_grad for p in x.parameters()) for x in self._decoder.layers]
        return trained.index(True) if any(trained) else len(trained)

    @contextmanager
    def _random(self, c: int, layer: int = -1) -> Iterator[None]:
        """A context in which random numbers are the same each time this layer runs on this chunk;
        the generators outside are unchanged."""
        kind = next((device.type for device in self._devices), None)
        with torch.random.fork_rng(self._devices, enabled=self._seed is not None, device_type=kind):
            if self._seed is not None:
                torch.manual_seed(self._seed + (layer + 1) * len(self.chunks) + c)
            yield


def _fitting(chunk: int | None, specs: list[CacheSpec]) -> int:
    """Tokens per chunk: `chunk`, or by default 1,024 or the smallest budget if that is less.

    Raises:
        ShapeError: `chunk` is not a whole number of at least 1, or exceeds a budget.
    """
    one = min(specs, key=lambda one: one.policy.budget or CHUNK)
    budget = one.policy.budget or chunk or CHUNK
    if chunk is None:
        return min(CHUNK, budget)
    if not isinstance(chunk, Integral) or chunk < 1:
        raise ShapeError(f"a chunk of {chunk} tokens; give a whole number of at least 1")
    if chunk > budget:
        raise ShapeError(
            f"a chunk of {chunk} tokens for {one}, which keeps {budget}: more tokens would be "
            f"computed at once than are kept; use chunk={budget} or less, or a larger budget"
        )
    return int(chunk)
