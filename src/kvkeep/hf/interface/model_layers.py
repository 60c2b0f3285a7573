"""ModelLayers: the types of a model's layers, as transformers asks a cache for them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple, Self

from kvkeep.host import LayerKind


class ModelLayers(NamedTuple):
    """The types of a model's layers.

    Args:
        indices: for an attention layer, by its index among all layers, its index among attention
            layers.
        sliding, linear, dummy: for each layer, whether it has a sliding window; whether it is
            recurrent and does not attend; whether it is neither recurrent nor attends.
    """

    indices: Mapping[int | None, int]
    sliding: Sequence[bool]
    linear: Sequence[bool]
    dummy: Sequence[bool]

    @classmethod
    def of(cls, attending: Sequence[LayerKind], recurrent: Collection[int], count: int) -> Self:
        """The types of the layers of a model with `count` layers.

        Args:
            attending: the attention layers.
            recurrent: indices of the layers with states, among all layers.
        """
        indices = {kind.place: at for at, kind in enumerate(attending)}
        windows = {kind.place for kind in attending if kind.window is not None}
        linear = [x in recurrent and x not in indices for x in range(count)]
        dummy = [not linear[x] and x not in indices for x in range(count)]
        return cls(indices, [x in windows for x in range(count)], linear, dummy)


class TellsLayers:
    """The properties by which a cache tells transformers the types of its model's layers."""

    model_layers: ModelLayers

    @property
    def is_sliding(self) -> list[bool]:
        return [*self.model_layers.sliding]

    @property
    def is_linear(self) -> list[bool]:
        return [*self.model_layers.linear]

    @property
    def is_dummy(self) -> list[bool]:
        return [*self.model_layers.dummy]
