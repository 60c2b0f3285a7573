"""Steps inside a compiled graph: one opaque operation each, so that nothing of a cache is traced.

A graph knows a layer by its ticket, a small tensor that leads to it while it runs. So one graph
serves any cache of a model, whatever its length, and no Python number of a cache is compiled in.
"""

from __future__ import annotations

from itertools import count
from typing import Any, Protocol, cast
from weakref import WeakValueDictionary, ref

import torch
from torch import Tensor

from kvkeep.errors import StateError
from kvkeep.layer.layer import LayerCache
from kvkeep.layer.step import StepInputs

ON_HOST = (torch.Tag.cudagraph_unsafe,)  # what a replay would leave out
_GONE = "this graph was given a cache that is gone, or from another process"


class Traced(Protocol):
    """What a graph may ask of a layer; in it, tensors are symbols."""

    @property
    def on_device(self) -> bool:
        """Whether it does so outside of compiled graphs too."""

    def fed(self) -> Tensor:
        """Columns the layer was fed, int64 ()."""

    def next_positions(self, n: int, real: Tensor | None, device: torch.device) -> Tensor:
        """Positions of the next n tokens, int32 (1, n); (B, n) with -1 for padding where `real`,
        bool (B, n), says what is not."""

    def run(self, inputs: StepInputs) -> Tensor:
        """`LayerCache.run`; position as from `next_positions`."""


class Steps(Protocol):
    """What a ticket leads to: `in_graph` is the step, the others are as in `Traced`."""

    def fed(self) -> int | Tensor:
        """Columns fed."""

    def next_positions(self, n: int, real: Tensor | None, device: torch.device) -> Tensor:
        """See `Traced`."""

    def in_graph(self, inputs: StepInputs) -> Tensor:
        """See `Traced.run`."""


class OfLayer:
    """A layer's steps, from a graph, which does not keep it."""

    def __init__(self, layer: LayerCache) -> None:
        self._known = ref(layer)

    @property
    def _layer(self) -> LayerCache:
        layer = self._known()
        if layer is None:
            raise StateError(_GONE)
        return layer

    def fed(self) -> int:
        """See `Steps`."""
        return self._layer.fed

    def next_positions(self, n: int, real: Tensor | None, device: torch.device) -> Tensor:
        """See `Steps`."""
        if real is not None and bool(real.all()):
            position = self._layer.next_positions(n, device)
        else:
            position = self._layer.next_positions(n, device, real)
        return position.view(-1, n) if real is None else position.expand(real.shape)

    def in_graph(self, inputs: StepInputs) -> Tensor:
        """See `Steps`."""
        return run(self._layer, inputs)


_steps: WeakValueDictionary[int, Any] = WeakValueDictionary()
_numbers = count(1)


class Ticket:
    """Leads to the steps of a layer of this process, as long as they live."""

    on_device = False

    def __init__(self, steps: Steps) -> None:
        number = next(_numbers)
        _steps[number] = steps
        with torch.inference_mode(False):
            self.number = torch.tensor([number])

    def fed(self) -> Tensor:
        """See `Traced`."""
        return cast(Tensor, fed(self.number))

    def next_positions(self, n: int, real: Tensor | None, device: torch.device) -> Tensor:
        """See `Traced`."""
        return cast(Tensor, next_positions(self.number, n, real, device))

    def run(self, inputs: StepInputs) -> Tensor:
        """See `Traced`."""
        return cast(Tensor, step(self.number, *inputs))


class LayerTicket(Ticket):
    """Leads to a layer."""

    def __init__(self, layer: LayerCache) -> None:
        self._of = OfLayer(layer)
        super().__init__(self._of)


def _led_to(ticket: Tensor) -> Steps:
    steps: Steps | None = _steps.get(int(ticket))
    if steps is None:
        raise StateError(_GONE)
    return steps


@torch.library.custom_op("kvkeep::fed", mutates_args=("ticket",), tags=ON_HOST)
def fed(ticket: Tensor) -> Tensor:
    """`Ticket.fed`. (It is said to change the ticket to keep its place in the graph.)"""
    return torch.as_tensor(_led_to(ticket).fed()).clone()


@fed.register_fake
def _(ticket: Tensor) -> Tensor:
    return torch.empty((), dtype=torch.int64)


@torch.library.custom_op("kvkeep::next_positions", mutates_args=("ticket",), tags=ON_HOST)
def next_positions(ticket: Tensor, n: int, real: Tensor | None, device: torch.device) -> Tensor:
    """`Ticket.next_positions`."""
    return _led_to(ticket).next_positions(n, real, device).clone()


@next_positions.register_fake
def _(ticket: Tensor, n: int, real: Tensor | None, device: torch.device) -> Tensor:
    return torch.empty((1, n) if real is None else real.shape, dtype=torch.int32, device=device)


@torch.library.custom_op("kvkeep::step", mutates_args=("ticket",), tags=ON_HOST)
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
    """`Ticket.run`."""
    inputs = StepInputs(q, k, v, position, scale, softcap, sinks)
    return _led_to(ticket).in_graph(inputs).contiguous()


def run(layer: LayerCache, inputs: StepInputs) -> Tensor:
    """A layer's step where the positions are (1, n) or (B, n); contiguous."""
    position = inputs.position
    assert position is not None
    if not layer.padded and bool((position >= 0).all()):
        inputs = inputs._replace(position=position[0])  # the rows are alike
    return layer.run(inputs).contiguous()


@step.register_fake
def _(ticket: Tensor, q: Tensor, k: Tensor, v: Tensor, *others: object) -> Tensor:
    return q.new_empty((*q.shape[:3], v.shape[3]))
