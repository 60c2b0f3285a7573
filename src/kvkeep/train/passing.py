"""A layer's forward through the chunks of a text: its state from chunk to chunk, and its records
for the backward."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvkeep.files.offload import Kept, Offload
from kvkeep.host.layerwise import Layerwise
from kvkeep.layer.layer import LayerCache
from kvkeep.train.cell import Cell, Recorder, Unattending
from kvkeep.train.messages import Message, layer_state, of_layer, of_slots, slots_from
from kvkeep.train.slots import Slots


@dataclass
class Trace:
    """The records of a layer's forward for the backward, by chunk.

    Attributes:
        inputs: the layer's inputs.
        marks: its recurrent states before the chunk.
        evicted: positions evicted before the first chunk, then after each chunk.
        pairs: its keys and values, if other layers read them.
        pair_gradients: the gradients of `pairs` from these layers, summed over the layers whose
            backward has run.
    """

    inputs: list[Kept]
    marks: list[dict[str, Kept]] = field(default_factory=list)
    evicted: list[list[Tensor]] = field(default_factory=lambda: [[]])
    pairs: list[tuple[Kept, Kept]] = field(default_factory=list)
    pair_gradients: dict[int, tuple[Kept, ...]] = field(default_factory=dict)

    def pair(self, c: int, store: Offload) -> tuple[Tensor, Tensor]:
        """The keys and values of a chunk."""
        keys, values = self.pairs[c]
        return store.get(keys), store.get(values)


class Passing:
    """The forward of a layer that does not attend.

    Args:
        states: the layer's recurrent states before the first chunk.
    """

    def __init__(self, states: dict[str, Tensor]) -> None:
        self.states = states

    def step(self, c: int) -> Unattending:
        """The `ChunkStep` for chunk c; it changes `states`."""
        return Unattending(self.states)

    def end(self, c: int, step: Unattending) -> None:
        """Called after the layer has computed chunk c."""

    def message(self) -> Message:
        """The layer's state after the last chunk, for the next process, without `states`."""
        return Message({}, {})

    def close(self) -> None:
        """Called at the end."""


class Recording(Passing):
    """The forward of a layer with slots, whose evictions are recorded.

    Args:
        cache: the layer's cache, empty.
        trace: records the evictions, and if `read`, keys and values.
        states: see `Passing`.
        read: whether other layers read this layer's keys and values.
    """

    def __init__(
        self,
        cache: LayerCache,
        trace: Trace,
        store: Offload,
        states: dict[str, Tensor],
        *,
        read: bool,
    ) -> None:
        super().__init__(states)
        self._cache, self._trace, self._store, self._read = cache, trace, store, read

    def restore(self, before: Message, text: Layerwise, columns: int) -> None:
        """Continue from the previous process's message, after `columns` columns."""
        self._cache.cursor.evicted = []  # while evictions are recorded, rows are not parted
        self._cache.restore(layer_state(before, text.history(columns)))

    def step(self, c: int) -> Recorder:
        return Recorder(self._cache, self.states)

    def end(self, c: int, step: Unattending) -> None:
        assert isinstance(step, Recorder)
        self._trace.evicted[-1] += [x.cpu() for x in step.before]
        self._trace.evicted.append([x.cpu() for x in step.after])
        if self._read:
            with torch.no_grad():
                keys, values = step.pair
            self._trace.pairs.append((self._store.put(keys), self._store.put(values)))

    def message(self) -> Message:
        return of_layer(self._cache.state())

    def close(self) -> None:
        self._cache.reset()


class Reading(Passing):
    """The forward of a layer that reads an earlier layer's slots. It repeats that layer's
    evictions.

    Args:
        cache: the earlier layer's cache, empty again.
        trace: the earlier layer's records.
        text: the text, of which this process computes `chunks`.
        before: the slots after the previous process's chunks; None: this process is the first.
    """

    def __init__(
        self,
        cache: LayerCache,
        trace: Trace,
        store: Offload,
        text: Layerwise,
        chunks: list[slice],
        before: Message | None,
    ) -> None:
        super().__init__({})
        self._cache, self._trace, self._store = cache, trace, store
        self._text, self._chunks = text, chunks
        self._slots = slots_before(cache, trace, store, before)

    def step(self, c: int) -> Cell:
        start = self._chunks[c].start
        past, pair = self._slots.past if start else None, self._trace.pair(c, self._store)
        return Cell(self._cache, past, self._text.history(start), self.states, pair)

    def end(self, c: int, step: Unattending) -> None:
        k, v = self._trace.pair(c, self._store)
        self._slots.push(k, v, self._text.positions(self._chunks[c]), self._trace.evicted[c + 1])

    def message(self) -> Message:
        return of_slots(self._slots)


def slots_before(cache: LayerCache, trace: Trace, store: Offload, before: Message | None) -> Slots:
    """A layer's slots before the first chunk of this process.

    Args:
        before: the slots after the previous process's chunks; None: this process is the first.
    """
    if before is None:
        return Slots(store, cache)
    slots = slots_from(before, store, cache)
    slots.evict(trace.evicted[0])
    return slots
