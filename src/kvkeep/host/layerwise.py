"""Layerwise: run a model layer by layer, for training."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch import Tensor, nn

from kvkeep.geometry import Geometry
from kvkeep.layer.history import History
from kvkeep.layer.step import StepInputs


class LayerStep(Protocol):
    """Computes the attention of one layer for one chunk; a `LayerCache` is one."""

    def run(self, inputs: StepInputs) -> Tensor:
        """The output (B, Hq, n, Dv); `position` is int32 (n,) or (B, n) with -1 for padding."""


class ChunkStep(LayerStep, Protocol):
    """What a layer computes with for one chunk.

    Attributes:
        states: the layer's recurrent states before the chunk by name, (B, ...) each, none before
            the first token; `Layerwise.layer` replaces them by those after it.
        shared: the chunk's keys and values, (B, H, n, D) each, of the earlier layer whose slots the
            layer reads; None: it reads no other layer's.
    """

    states: dict[str, Tensor]
    shared: tuple[Tensor, Tensor] | None


class Carries(NamedTuple):
    """What a layer carries from chunk to chunk.

    Args:
        slots: the index, among the layers of a cache, of the slots that it attends to; None: it
            does not attend.
        reads: the index of the earlier layer that writes these slots; None: it writes them itself.
        stateful: whether it is recurrent.
    """

    slots: int | None
    reads: int | None = None
    stateful: bool = False


class Embedded(NamedTuple):
    """The results of a model before its first layer.

    `hidden` (B, n, width) is the first layer's input. `calls` has one entry for each layer: its
    remaining arguments, in nested tuples, lists and dicts, with gradients as `hidden`. `outputs`
    are further
    results that must receive a gradient of zero in a backward (FSDP2 waits for a gradient of the
    whole model's output).
    """

    hidden: Tensor
    calls: list[Any]
    outputs: tuple[Tensor, ...] = ()


class Layerwise(ABC):
    """A model run layer by layer, for one batch of texts whose columns are fed a chunk at a time.

    A context manager that undoes its changes to the model on exit.

    Args:
        model: the module whose parameters are trained.
        input_ids: token ids (B, T).
        attention_mask: (B, T), 0 for padding; None: no padding.
        layers: the model's layers, in order.
        vocabulary: logits per token, V.

    Attributes:
        attention_mask: the given mask; None if no token is padding.
        carries: what each layer carries.
    """

    carries: Sequence[Carries]

    def __init__(
        self,
        model: nn.Module,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        *,
        layers: Iterable[nn.Module],
        vocabulary: int,
    ) -> None:
        self.model, self.input_ids = model, input_ids
        self.layers, self.vocabulary = list(layers), vocabulary
        padded = attention_mask is not None and not bool(attention_mask.bool().all())
        self.attention_mask = attention_mask if padded else None
        self.carries = [Carries(index) for index in range(len(self.layers))]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        return None

    @property
    def outside_layers(self) -> list[nn.Parameter]:
        """Parameters that are not in a layer."""
        inside = {id(p) for layer in self.layers for p in layer.parameters()}
        return [p for p in self.model.parameters() if id(p) not in inside]

    def history(self, columns: int) -> History:
        """The history that every layer has after the first `columns` columns."""
        history, mask = History(), self.attention_mask
        history.columns = history.floor = columns
        history.geometry = Geometry(len(self.input_ids), 1, 1, 1, torch.float32)
        if mask is not None:
            history.pads = (mask[:, :columns] == 0).sum(dim=1)
        return history

    def positions(self, columns: slice) -> Tensor:
        """Positions of a chunk's tokens: int32 (n,), or (B, n) with -1 for padding."""
        count, mask = columns.stop - columns.start, self.attention_mask
        real = None if mask is None else mask[:, columns].bool()
        return self.history(columns.start).next_positions(count, self.input_ids.device, real)

    @abstractmethod
    def embed(self, columns: slice) -> Embedded:
        """Compute the first layer's input for a chunk, with gradients where they are enabled.

        Raises:
            UnsupportedError: the model cannot be run layer by layer.
        """

    @abstractmethod
    def layer(
        self, index: int, columns: slice, hidden: Tensor, call: Any, step: ChunkStep
    ) -> Tensor:
        """Run one layer on a chunk, with attention by `step`: hidden (B, n, width) -> the same.

        Args:
            call: the layer's entry of `Embedded.calls` for this chunk.
        """

    @abstractmethod
    def hidden(self, columns: slice, output: Tensor) -> Tensor:
        """Apply the final norm to the last layer's output for a chunk, (B, n, width)."""

    @abstractmethod
    def logits(self, columns: slice, output: Tensor) -> Tensor:
        """The logits (B, n, V) of the last layer's output for a chunk.

        Raises:
            UnsupportedError: the model has no language model head.
        """
