"""AttendingLayer: a layer that looks empty to the model but attends to slots stored elsewhere."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from kvkeep.layer.history import History
from kvkeep.layer.step import StepInputs


class AttendingLayer(ABC):
    """The part of a layer that a model calls in a chunk.

    To the model the layer holds nothing before the chunk, so positions and masks are a
    new text's. Its attention may read slots of other layers.
    """

    padded = False
    window: int | None
    """The layer's own sliding window, in tokens."""

    @abstractmethod
    def next_positions(self, n: int, device: torch.device, real: Tensor | None = None) -> Tensor:
        """The chunk's positions: int32 (n,)."""

    @abstractmethod
    def run(self, inputs: StepInputs) -> Tensor:
        """Attention of the chunk; see `LayerCache.run`."""

    @property
    def history(self) -> History:
        """An empty history: to the model, the tokens are a text of their own."""
        return History()

    @property
    def fed(self) -> int:
        """0, as `history` says."""
        return 0

    @property
    def seen(self) -> Tensor:
        return self.history.seen

    def positions(self) -> Tensor:
        return torch.empty(1, 1, 0, dtype=torch.int32)
