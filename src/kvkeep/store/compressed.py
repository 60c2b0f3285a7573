"""Compressed: the slots of a compressed text, which stores hold as one entry."""

from __future__ import annotations

from typing import final

import torch

from kvkeep.geometry import Geometry
from kvkeep.host import ModelCache
from kvkeep.layer.history import History, LayerState, by_part
from kvkeep.planes import POSITION
from kvkeep.store.geometry import LayerGeometry, ModelGeometry
from kvkeep.store.layer_slices import Stretch


@final
class Compressed(Stretch):
    """Each layer's encoded planes, (1, H|1, slots, ...), by part and plane, such as `head.0.k`.
    Heads keep different tokens, so a compressed text cannot be cut at a token."""

    @classmethod
    def of(cls, cache: ModelCache) -> Compressed:
        """A copy of the slots of a compressed cache of one row."""
        cache.mend("store")
        layers = []
        for state in (layer.state() for layer in cache.layers):
            tensors, centre = state.tensors(), state.history.centre
            tensors |= {} if centre is None else {f"{_CENTRE}.held": centre}
            layers.append({name: x.clone() for name, x in tensors.items()})
        return cls(layers, cache.fed)

    def state(self, index: int, geometry: Geometry) -> LayerState:
        """The state of a layer that holds these slots; the tensors are not copied.

        Args:
            geometry: the layer's geometry, for one row.
        """
        history = History()
        history.columns = history.floor = len(self)
        history.geometry = geometry
        parts = by_part(self.layers[index])
        history.centre = parts.pop(_CENTRE, {}).get("held")
        return LayerState(history, parts).to(geometry.device)

    def fill(self, cache: ModelCache, geometry: ModelGeometry) -> None:
        """Copy the text into an empty cache of the same specs."""
        for index, (layer, own) in enumerate(zip(cache.layers, geometry.of_rows, strict=True)):
            layer.restore(self.state(index, own))
        cache.routed = geometry.routed

    def bytes_in(self, geometry: ModelGeometry) -> int:
        return self.nbytes  # heads keep different numbers of tokens

    def why_not(self, index: int, layer: LayerGeometry, start: int = 0) -> str:
        """Why the planes of layer `index` do not fit it; empty if they do. `start` is 0."""
        parts = by_part(self.layers[index])
        heads = layer.of_row.heads
        centre = parts.pop(_CENTRE, {}).get("held")
        if (None if centre is None else (tuple(centre.shape), centre.dtype)) != layer.centre:
            return f" has a centre other than {layer.centre}"
        tail = parts.pop("slots", {}) if layer.tail else {}
        own = {f"head.{head}" for head in range(heads)} if layer.ragged else {"slots"}
        if parts.keys() != own and (parts or not tail):
            return f" has parts {sorted(parts)}, not {sorted(own)}"
        for name, planes in {**parts, **({"tail": tail} if tail else {})}.items():
            own_heads = heads if name in ("slots", "tail") else 1
            slots = planes.get(POSITION, torch.empty(0)).numel()
            slots //= heads if name == "tail" else 1
            if reason := layer.why_not(planes, own_heads, slots, tail=name == "tail"):
                return f", {name}{reason}"
        if not layer.ragged:
            at = parts["slots"][POSITION].flatten().sort().values.tolist()
            if at != list(range(max(1, len(self)) - len(at), len(self))):
                return f", slots has positions other than the newest {len(at)}"
            return ""
        for head in range(heads):
            name = f"head.{head}"
            coded = parts[name][POSITION].flatten() if parts else torch.empty(0)
            plain = tail[POSITION][0, head] if tail else torch.empty(0)
            at = torch.cat([coded, plain[plain >= 0]]).sort().values.tolist()
            if not (at and at[0] >= 0 and at[-1] < len(self)):
                return f", {name} has no positions, or positions outside of its {len(self)} tokens"
            if len(set(at)) < len(at):
                return f", {name} holds a token twice"
        return ""


_CENTRE = "centre"  # the part whose only plane is `History.centre`
