"""PackedLayer: the same layer of several sequences, whose tokens lie in one row."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvkeep.errors import UnsupportedError
from kvkeep.layer.history import History
from kvkeep.layer.layer import LayerCache
from kvkeep.layer.step import StepInputs


class PackedLayer:
    """Runs a step of each sequence's own layer, on its range of the tokens.

    Args:
        layers: one layer of each sequence's cache; they hold one row each, or nothing.
        counts: how many tokens of each sequence there are, in order.
    """

    padded = False

    def __init__(self, layers: Sequence[LayerCache], counts: Sequence[int]) -> None:
        self._layers, self._counts = layers, counts

    @property
    def window(self) -> int | None:
        """The layer's own sliding window, in tokens."""
        return self._layers[0].window

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

    def next_positions(self, n: int, device: torch.device, real: Tensor | None = None) -> Tensor:
        """The tokens' positions, each in its own sequence: int32 (n,)."""
        if n != sum(self._counts) or real is not None:
            raise UnsupportedError(
                f"a packed forward of {sum(self._counts)} tokens asks for positions of {n}; the "
                "model divides the tokens or pads them, so feed its sequences one by one"
            )
        found = [
            layer.next_positions(count, device)
            for layer, count in zip(self._layers, self._counts, strict=True)
        ]
        return torch.cat(found)

    def run(self, inputs: StepInputs) -> Tensor:
        """Attention of all tokens: (1, Hq, n, Dv); see `LayerCache.run`."""
        q, k, v, position = inputs[:4]
        assert position is not None
        outs, first = [], 0
        for layer, count in zip(self._layers, self._counts, strict=True):
            at = slice(first, first + count)
            own = inputs._replace(
                q=q[:, :, at], k=k[:, :, at], v=v[:, :, at], position=position[..., at]
            )
            outs.append(layer.run(own))
            first += count
        return torch.cat(outs, dim=2)
