"""Steps inside a compiled graph: one opaque operation each, so that nothing of a cache is traced.

A graph knows a layer by its ticket, a small tensor that leads to it while it runs. So one graph
serves any cache of a model, whatever its length, and no Python number of a cache is compiled in.
"""

from __future__ import annotations

from itertools import count
from typing import Any, Protocol, cast
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from kvkeep.errors import StateError
from kvkeep.layer import LayerCache


class Traced(Protocol):
    """What a graph may ask of a layer; in it, tensors are symbols."""

    def fed(self) -> Tensor:
        """Columns the layer was fed, int64 ()."""

    def next_positions(self, n: int, real: Tensor | None, device: torch.device) -> Tensor:
        """Positions of the next n tokens, int32 (1, n); (B, n) with -1 for padding where `real`,
        bool (B, n), says what is not."""

    def step(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        position: Tensor,
        scale: float,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """`LayerCache.step`; position as from `next_positions`."""


_layers: WeakValueDictionary[int, LayerCache] = WeakValueDictionary()
_numbers = count(1)


class Ticket:
    """Leads to a layer of this process, as long as it lives."""

    def __init__(self, layer: LayerCache) -> None:
        number = next(_numbers)
        _layers[number] = layer
        with torch.inference_mode(False):
            self.number = torch.tensor([number])

    def fed(self) -> Tensor:
        """See `Traced`."""
        return cast(Tensor, fed(self.number))

    def next_positions(self, n: int, real: Tensor | None, device: torch.device) -> Tensor:
        """See `Traced`."""
        return cast(Tensor, next_positions(self.number, n, real, device))

    def step(self, *arguments: Any) -> Tensor:
        """See `Traced`."""
        return cast(Tensor, step(self.number, *arguments))


def _layer(ticket: Tensor) -> LayerCache:
    layer = _layers.get(int(ticket))
    if layer is None:
        raise StateError("this graph was given a cache that is gone, or from another process")
    return layer


@torch.library.custom_op("kvkeep::fed", mutates_args=("ticket",))
def fed(ticket: Tensor) -> Tensor:
    """`Ticket.fed`. (It is said to change the ticket to keep its place in the graph.)"""
    return torch.tensor(_layer(ticket).fed)


@fed.register_fake
def _(ticket: Tensor) -> Tensor:
    return torch.empty((), dtype=torch.int64)


@torch.library.custom_op("kvkeep::next_positions", mutates_args=("ticket",))
def next_positions(ticket: Tensor, n: int, real: Tensor | None, device: torch.device) -> Tensor:
    """`Ticket.next_positions`."""
    layer = _layer(ticket)
    if real is not None and bool(real.all()):
        position = layer.next_positions(n, device)
    else:
        position = layer.next_positions(n, device, real)
    return (position.view(-1, n) if real is None else position.expand(real.shape)).clone()


@next_positions.register_fake
def _(ticket: Tensor, n: int, real: Tensor | None, device: torch.device) -> Tensor:
    return torch.empty((1, n) if real is None else real.shape, dtype=torch.int32, device=device)


@torch.library.custom_op("kvkeep::step", mutates_args=("ticket",))
def step(
    ticket: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    position: Tensor,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """`Ticket.step`."""
    layer = _layer(ticket)
    return run(layer, q, k, v, position, scale=scale, softcap=softcap, sinks=sinks)


def run(
    layer: LayerCache, q: Tensor, k: Tensor, v: Tensor, position: Tensor, **options: Any
) -> Tensor:
    """A layer's step where the positions are (1, n) or (B, n); contiguous."""
    if not layer.padded and bool((position >= 0).all()):
        position = position[0]  # the rows are alike
    return layer.step(q, k, v, position, **options).contiguous()


@step.register_fake
def _(ticket: Tensor, q: Tensor, k: Tensor, v: Tensor, *others: object) -> Tensor:
    return q.new_empty((*q.shape[:3], v.shape[3]))
