"""Rereading: a layer that reads part of a text a second time, to record its attention weights."""

from __future__ import annotations

import torch
from torch import Tensor

from kvkeep.attention import Held, Segment, View, dispatch
from kvkeep.codec import Plain
from kvkeep.errors import UnsupportedError
from kvkeep.layer.attending import AttendingLayer
from kvkeep.layer.step import Slopes, StepInputs, require_causal
from kvkeep.planes import POSITION, Chunks, OwnWindow, Reach


class Rereading(AttendingLayer):
    """Attends to some of a layer's tokens and to its own chunk. Nothing is written.

    Args:
        held: all tokens of one row, in the order of their positions.
        runs: the tokens to attend to, as ascending index ranges (first, end) of `held`.
        start: the position of the chunk's first token.
        window: the layer's own sliding window; None: no window. Only then weights are recorded.
        slopes: the layer's slopes (ALiBi); None: no slopes.
    """

    window: OwnWindow | None

    def __init__(
        self,
        held: Held,
        runs: list[tuple[int, int]],
        start: int,
        window: OwnWindow | None,
        slopes: Slopes | None,
    ) -> None:
        self.window, self._start, self._slopes = window, start, slopes
        self._past = tuple(
            _segment(*(x[:, :, first:end] for x in held[:3])) for first, end in runs if first < end
        )
        self.largest: Tensor | None = None
        """The largest weight that each token of `runs` received, fp32 (1, H, tokens)."""

    def next_positions(self, n: int, device: torch.device, real: Tensor | None = None) -> Tensor:
        """Positions of the chunk: int32 (n,)."""
        if real is not None:
            raise UnsupportedError("the second reading of a text has no padding")
        return torch.arange(self._start, self._start + n, dtype=torch.int32, device=device)

    def run(self, inputs: StepInputs) -> Tensor:
        """Attention of the chunk: (1, Hq, n, Dv)."""
        require_causal(inputs)
        q, k, v, position = inputs[:4]
        if position is None:
            position = self.next_positions(q.shape[2], q.device)
        segments = (*self._past, _segment(k, v, position.reshape(1, 1, -1)))
        position, window = position.flatten(), self.window
        view = View(segments, position, False)
        if isinstance(window, Chunks):
            first = position + 1 - window.behind(position)
            view = view._replace(bounds=torch.stack([first, position]))
        elif window is not None:
            view = view._replace(reaches=(Reach(window),))
        observed = window is None
        options = inputs.options(self._slopes, need_mass=observed, peak=observed)
        out, weights = dispatch(q, view, options)
        if weights is not None:
            self.largest = weights[:, :, : weights.shape[2] - q.shape[2]]
        return out


def _segment(k: Tensor, v: Tensor, position: Tensor) -> Segment:
    return Segment({"k": k, "v": v, POSITION: position.int()}, Plain(), Plain())
