"""RowsCache: several sequences, with one token each, as the rows of a compiled graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import transformers
from torch import Tensor

from kvkeep.graph.custom_ops import LayerTicket
from kvkeep.hf.config import decoder_config, is_routed, layer_kinds
from kvkeep.hf.handover import MaskLength, hand_over
from kvkeep.layer.history import History
from kvkeep.layer.packed import PackedLayer, ReadyTogether
from kvkeep.layer.step import StepInputs

NUMBERS = (1, 2, 4, 8, 12, 16, 24, 32)
"""For these numbers of rows there are graphs; rows that no sequence has are computed in vain."""


class RowsOf:
    """The steps of one layer of several sequences. Its inputs have a row for each sequence, and
    spare rows behind them: q (rows, Hq, 1, D).

    Args:
        window: the layer's own sliding window, in tokens; None if it has none.
        chunked: whether that window begins at a multiple of its size.
    """

    padded, fed = False, 0

    def __init__(self, window: int | None, chunked: bool = False) -> None:
        self.window, self.chunked = window, chunked
        self._layer: PackedLayer | None = None

    @property
    def history(self) -> History:
        """An empty history: each row is at a position of its own, which the model is given."""
        return History()

    @property
    def seen(self) -> Tensor:
        return self.history.seen

    def positions(self) -> Tensor:
        return torch.empty(1, 1, 0, dtype=torch.int32)

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


class RowsCache(transformers.Cache):
    """What a model takes as `cache` in a compiled step of several sequences."""

    is_compileable = False
    is_initialized = True
    is_croppable = False
    offset = None

    def __init__(self, config: Any) -> None:
        self._config = decoder_config(config)
        self.layers: list[RowsOf] = [  # type: ignore[assignment]
            RowsOf(kind.window, kind.chunked) for kind in layer_kinds(config)
        ]
        self.tickets = [LayerTicket(layer) for layer in self.layers]

    def __len__(self) -> int:
        return len(self.layers)

    def use(self, layers: Sequence[PackedLayer | None]) -> None:
        """See `RowsOf.use`."""
        for own, layer in zip(self.layers, layers, strict=True):
            own.use(layer)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Tag the new keys and values (rows, H, 1, D) with their layer."""
        layer: Any = self.layers[layer_idx]
        hand_over(key_states, value_states, layer, self.tickets[layer_idx])
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """0: the model is given the tokens' positions."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Length and first column of the keys that `update` will return for this layer."""
        length = MaskLength(1)  # while tracing, a symbol cannot be of this subclass
        length.layer = self.layers[layer_idx]
        length.routed, length.traced = is_routed(self._config), self.tickets[layer_idx]
        length.compileable = False
        return length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """-1: there is no limit for all sequences."""
        return -1

    @property
    def is_sliding(self) -> list[bool]:
        return [layer.window is not None for layer in self.layers]


def _several(inputs: StepInputs, count: int) -> StepInputs:
    """The first `count` rows as tokens that lie side by side: q (1, Hq, count, D)."""
    q, k, v = (x[:count].transpose(0, 2) for x in inputs[:3])
    return inputs._replace(q=q, k=k, v=v)
