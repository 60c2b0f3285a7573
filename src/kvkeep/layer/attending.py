"""AttendingLayer: a layer that looks empty to the model but attends to slots stored elsewhere."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from kvkeep.layer.history import History
from kvkeep.layer.sight import Sighted
from kvkeep.layer.step import StepInputs


class AttendingLayer(ABC):
    """The part of a layer that a model calls for a chunk. Its attention may read slots of other
    layers.

    Attributes:
        window: the layer's own sliding window, in tokens.
        history: the record of the tokens fed before the chunk. By default empty, as for a new text.
    """

    window: int | None
    history = History()

    @abstractmethod
    def next_positions(self, n: int, device: torch.device, real: Tensor | None = None) -> Tensor:
        """The chunk's positions: int32 (n,)."""

    @abstractmethod
    def run(self, inputs: StepInputs) -> Tensor:
        """Attention of the chunk; see `LayerCache.run`."""

    def sighted(self, queries: Tensor) -> Sighted:
        """See `LayerCache.sighted`; only for layers of models that choose tokens."""
        raise NotImplementedError

    @property
    def fed(self) -> int:
        """Columns of `history`."""
        return self.history.columns

    @property
    def seen(self) -> Tensor:
        """Tokens of `history`, int64 (B,)."""
        return self.history.seen

    @property
    def padded(self) -> bool:
        """Whether any row had padding."""
        return self.history.pads is not None

    def positions(self) -> Tensor:
        """Positions of the slots before the chunk, int32 (B, 1, S)."""
        return torch.empty(1, 1, 0, dtype=torch.int32)
