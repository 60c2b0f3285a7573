"""LayersCache: a list of layers as the `transformers.Cache` of one forward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import transformers
from torch import Tensor

from kvkeep.graph.custom_ops import Ticket
from kvkeep.hf.handover import Handed, MaskLength, ModelLayer, hand_over, taggable
from kvkeep.hf.interface.model_layers import ModelLayers, TellsLayers
from kvkeep.hf.kinds import KeepsStates
from kvkeep.layer.recurrent import NoStates, RecurrentStates


class LayersCache(KeepsStates, TellsLayers, transformers.Cache):
    """A `cache` argument that stores nothing: it tags new keys and values (B, H, n, D) with their
    layer, for kvkeep's attention.

    Args:
        layers: a layer for each layer of the model that attends; its attention is kvkeep's.
        model_layers: all layers of the model.
        tickets: the layers' tickets, for a compiled forward.
    """

    is_compileable = False
    is_initialized = True
    is_croppable = False
    offset = None

    def __init__(
        self, layers: Sequence[Any], model_layers: ModelLayers, tickets: Sequence[Ticket] = ()
    ) -> None:
        self.layers: list[Any] = list(layers)
        self.model_layers, self.carried = model_layers, cast(RecurrentStates, NoStates())
        self.tickets = list(tickets)

    def __len__(self) -> int:
        return len(self.layers)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Tag the new keys and values; returns them."""
        key_states, value_states = taggable(key_states, value_states)
        self.tag(key_states, value_states, layer_idx)
        return key_states, value_states

    def tag(self, keys: Tensor, values: Tensor, place: int) -> Handed:
        """Tag new keys and values with layer `place` of the model."""
        index = self.index(place)
        layer: ModelLayer = self.layers[index]
        return hand_over(keys, values, layer, self.tickets[index] if self.tickets else None)

    def index(self, place: int) -> int:
        """The index in `layers` of a layer of the model; 0 if the layer does not attend."""
        return self.model_layers.indices.get(place, 0)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns before the chunk."""
        return int(self.layers[self.index(layer_idx)].fed)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Length and first column of the keys that `update` will return for this layer."""
        index = self.index(layer_idx)
        layer: ModelLayer = self.layers[index]
        # A symbol of torch's tracer cannot be a MaskLength; compiled chunks have one token.
        length = MaskLength(1 if self.tickets else layer.fed + query_length)
        length.layer, length.traced = layer, self.tickets[index] if self.tickets else None
        length.routed, length.compileable = True, False
        return length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """-1: there is no limit."""
        return -1
