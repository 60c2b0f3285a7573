"""An attached GPT in a compiled graph: the beginning of a forward and each layer's step are opaque
operations, which look up the attachment's cache when the graph runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from kvkeep.graph.custom_ops import ON_HOST, SteppedLayer, Ticket, define_operator, led_to, run
from kvkeep.layer.step import StepInputs

Layers = Callable[[], Sequence[SteppedLayer]]
Begin = Callable[[Tensor, Tensor], Tensor]


class LayerSteps:
    """A layer's steps, in the cache that is current when the graph runs.

    Args:
        layers: returns the layers of that cache.
        begin: begins a forward of ids (B, n) at `input_pos`; returns the positions, (n,) or (B, n),
            with -1 for padding.
    """

    def __init__(self, layers: Layers, index: int, begin: Begin) -> None:
        self._layers, self._index, self._begin = layers, index, begin

    @property
    def _layer(self) -> SteppedLayer:
        return self._layers()[self._index]

    def fed(self) -> int:
        """See `kvkeep.graph.custom_ops.Steps`."""
        return self._layer.fed

    def next_positions(self, n: int, real: Tensor | None, device: torch.device) -> Tensor:
        """See `kvkeep.graph.custom_ops.Steps`."""
        return self._layer.next_positions(n, device, real)

    def in_graph(self, inputs: StepInputs) -> Tensor:
        """See `kvkeep.graph.custom_ops.Steps`."""
        return run(self._layer, inputs)

    def begin(self, ids: Tensor, at: Tensor) -> Tensor:
        """Positions, int32 (1, n), or (B, n) if `at` has two dimensions."""
        placed = self._begin(ids, at)
        return placed.expand(at.shape if at.dim() == 2 else (1, len(at))).to(torch.int32)


class LayerTicket(Ticket):
    """A ticket for a layer; the first layer's ticket also begins a forward."""

    def __init__(self, steps: LayerSteps) -> None:
        self._steps = steps  # kept alive here: an operation refers to it only weakly
        super().__init__(steps)

    def begin(self, ids: Tensor, at: Tensor) -> Tensor:
        """See `LayerSteps.begin`."""
        return cast(Tensor, _begin_litgpt(self.number, ids, at))


def _run_begin(ticket: Tensor, ids: Tensor, at: Tensor) -> Tensor:
    steps: Any = led_to(ticket)
    return cast(Tensor, steps.begin(ids, at)).clone()


def _fake_begin(ticket: Tensor, ids: Tensor, at: Tensor) -> Tensor:
    return at.new_empty((1, *at.shape)[-2:], dtype=torch.int32)


_begin_litgpt = define_operator(
    "begin_litgpt(Tensor(a!) ticket, Tensor ids, Tensor at) -> Tensor",
    _run_begin,
    _fake_begin,
    ON_HOST,
)
