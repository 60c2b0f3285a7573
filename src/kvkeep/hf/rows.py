"""RowsCache: several sequences, with one token each, as the rows of a compiled graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvkeep.graph.custom_ops import LayerTicket
from kvkeep.hf.kinds import layer_kinds
from kvkeep.hf.layers_cache import LayersCache
from kvkeep.layer.attending import AttendingLayer
from kvkeep.layer.packed import PackedLayer, ReadyTogether
from kvkeep.layer.step import StepInputs

NUMBERS = (1, 2, 4, 8, 12, 16, 24, 32)
"""Batch sizes with a compiled graph. A batch is padded to the next size; padding rows are
discarded."""


def numbers_up_to(sequences: int) -> list[int]:
    """The batch sizes of batches of 1 to `sequences` sequences."""
    few = [number for number in NUMBERS if number < sequences]
    return [*few, *NUMBERS[len(few) :][:1]]


class RowsOf(AttendingLayer):
    """The steps of one layer of several sequences. Its inputs have a row for each sequence, and
    spare rows behind them: q (rows, Hq, 1, D).

    Args:
        window: the layer's own sliding window, in tokens; None if it has none.
    """

    def __init__(self, window: int | None) -> None:
        self.window = window
        self._layer: PackedLayer | None = None

    def use(self, layer: PackedLayer | None) -> None:
        """Use a layer of sequences that have one token each, for the next step; None: none."""
        self._layer = layer

    def next_positions(self, n: int, device: torch.device, real: Tensor | None = None) -> Tensor:
        """Zeros: the model is given the positions, and the layers know them."""
        return torch.zeros(1, n, dtype=torch.int32, device=device)

    def prepare(self) -> ReadyTogether | None:
        """See `LayerCache.prepare`."""
        assert self._layer is not None
        return self._layer.prepared()

    def run(self, inputs: StepInputs) -> Tensor:
        """Attention of all rows: (rows, Hq, 1, Dv); 0 in spare rows."""
        layer, q, v = self._layer, inputs.q, inputs.v
        assert layer is not None
        count = len(layer)
        out = q.new_zeros(len(q), q.shape[1], 1, v.shape[3])
        position = layer.next_positions(count, q.device)
        several = _several(inputs, count)._replace(position=position)
        out[:count] = layer.run(several).transpose(0, 2)
        return out


class RowsCache(LayersCache):
    """What a model takes as `cache` in a compiled step of several sequences."""

    def __init__(self, config: Any) -> None:
        layers = [RowsOf(kind.window) for kind in layer_kinds(config)]
        super().__init__(layers, [LayerTicket(layer) for layer in layers])

    def use(self, layers: Sequence[PackedLayer | None]) -> None:
        """See `RowsOf.use`."""
        for own, layer in zip(self.layers, layers, strict=True):
            own.use(layer)


def _several(inputs: StepInputs, count: int) -> StepInputs:
    """The first `count` rows as tokens that lie side by side: q (1, Hq, count, D)."""
    q, k, v = (x[:count].transpose(0, 2) for x in inputs[:3])
    return inputs._replace(q=q, k=k, v=v)
