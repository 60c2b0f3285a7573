"""ModelLayers: the layers of a model, as transformers asks a cache for them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple, Self

from kvkeep.host import LayerKind


class ModelLayers(NamedTuple):
    """What the layers of a model are.

    Args:
        indices: by the place of a layer that attends among all layers, its index among those that
            do.
        sliding, linear, dummy: for each layer, whether it has a window, is recurrent only, or is
            neither and does not attend.
    """

    indices: Mapping[int | None, int]
    sliding: Sequence[bool]
    linear: Sequence[bool]
    dummy: Sequence[bool]

    @classmethod
    def of(cls, attending: Sequence[LayerKind], recurrent: Collection[int], count: int) -> Self:
        """Those of a model with `count` layers.

        Args:
            attending: the layers that attend.
            recurrent: the places of the layers with states.
        """
        indices = {kind.place: at for at, kind in enumerate(attending)}
        windows = {kind.place for kind in attending if kind.window is not None}
        linear = [x in recurrent and x not in indices for x in range(count)]
        dummy = [not linear[x] and x not in indices for x in range(count)]
        return cls(indices, [x in windows for x in range(count)], linear, dummy)


class TellsLayers:
    """The properties by which a cache of transformers says what the layers of its model are."""

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
