"""What a recording asks of a layer's step: of one cache, or of several sequences."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from kvkeep.layer.ready import StepCall
from kvkeep.layer.step import StepInputs


class Ready(Protocol):
    """A step that only waits to be run; see `kvkeep.layer.ready.Ready`."""

    def begin(self) -> None:
        """Record the state to return to."""

    def start(self, running: bool = True) -> None:
        """Note that the caller is about to call the library, or that it did not after all."""

    def finish(self, result: int) -> bool:
        """Note the result of the library; False: the step must be made by `Repeatable.run`."""

    def end(self) -> None:
        """Count the tokens if the step has run; otherwise return to the state before it."""

    @property
    def call(self) -> StepCall:
        """The call of the library that makes it."""


class Repeatable(Protocol):
    """A layer whose steps a recording repeats."""

    @property
    def fed(self) -> int:
        """Columns fed."""

    def next_positions(self, n: int, device: torch.device) -> Tensor:
        """See `LayerCache.next_positions`."""

    def prepare(self, inputs: StepInputs, out: Tensor) -> Ready | None:
        """See `LayerCache.prepare`."""

    def run(self, inputs: StepInputs) -> Tensor:
        """See `LayerCache.run`."""
