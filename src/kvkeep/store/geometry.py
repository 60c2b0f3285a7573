"""Geometry: what the slots of one identity are like, as the model says, not a block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from kvkeep.cache import Cache
from kvkeep.geometry import Geometry
from kvkeep.layer.layer import LayerCache
from kvkeep.layer.stats import slot_planes
from kvkeep.planes import POSITION, PlaneSpec

if TYPE_CHECKING:
    from kvkeep.store.backend import StoredBlock


@dataclass(frozen=True)
class LayerGeometry:
    """The geometry of one row of a layer, and the planes of its slots."""

    of_row: Geometry
    planes: Mapping[str, PlaneSpec]

    @classmethod
    def of(cls, layer: LayerCache, geometry: Geometry) -> LayerGeometry:
        """That of a layer which is fed keys and values of such a geometry."""
        return cls(geometry._replace(rows=1), planes_of(layer, geometry))


@dataclass(frozen=True)
class ModelGeometry:
    """What all entries of one identity have in common.

    Args:
        layers: of each of the model's layers.
        routed: see `kvkeep.cache.Cache.routed`.
    """

    layers: tuple[LayerGeometry, ...]
    routed: bool | None

    @classmethod
    def of(
        cls, layers: Sequence[LayerCache], geometries: Sequence[Geometry], routed: bool | None
    ) -> ModelGeometry:
        """That of a cache's layers which are fed keys and values of such geometries."""
        return cls(tuple(map(LayerGeometry.of, layers, geometries)), routed)

    @classmethod
    def of_cache(cls, cache: Cache) -> ModelGeometry:
        """That of a cache that was fed something."""
        geometries = [layer.ledger.geometry for layer in cache.layers]
        return cls.of(cache.layers, list(filter(None, geometries)), cache.routed)

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's slots in all layers."""
        return sum(
            spec.slot_bytes(layer.of_row.heads)
            for layer in self.layers
            for spec in layer.planes.values()
        )

    @cached_property
    def of_rows(self) -> list[Geometry]:
        """That of one row of each layer, on its device."""
        return [layer.of_row for layer in self.layers]

    def why_not(self, block: StoredBlock, start: int) -> str:
        """Why a block whose first token has a position cannot be of this geometry; empty if it
        can."""
        if block.routed != self.routed:
            return f"it was computed with routed={block.routed}, not {self.routed}"
        if len(block.geometries) != len(self.layers):
            return f"it has {len(block.geometries)} layers, not {len(self.layers)}"
        n = len(block.tokens)
        position = torch.arange(start, start + n, dtype=torch.int32)
        for index, (layer, found, planes) in enumerate(
            zip(self.layers, block.geometries, block.stretch.layers, strict=True)
        ):
            said, own = found[1:5], layer.of_row[1:5]  # a block lies on no device
            if said != own:
                return f"layer {index} is of {said}, not {own}"
            if planes.keys() != layer.planes.keys():
                return f"layer {index} has planes {sorted(planes)}, not {sorted(layer.planes)}"
            for name, spec in layer.planes.items():
                shape = (1, 1 if spec.shared else layer.of_row.heads, n, *spec.shape)
                x = planes[name]
                if (tuple(x.shape), x.dtype) != (shape, spec.dtype):
                    return (
                        f"layer {index}, plane {name} is {tuple(x.shape)} {x.dtype}, not {shape} "
                        f"{spec.dtype}"
                    )
            if not planes[POSITION].flatten().cpu().equal(position):
                return f"layer {index} has other positions than {start} to {start + n - 1}"
        return ""

    def __str__(self) -> str:
        planes, first = self.layers[0].planes, self.layers[0].of_row
        return (
            f"{len(self.layers)} layers, the first of {first.heads} heads of "
            f"{first.key_width}/{first.value_width}, {first.dtype} on {first.device}, planes "
            f"{', '.join(planes)}, routed={self.routed}"
        )


def planes_of(layer: LayerCache, geometry: Geometry) -> dict[str, PlaneSpec]:
    """The planes of a layer's slots, for keys and values of a geometry."""
    return slot_planes(layer.policy, layer.key_codec, layer.value_codec, geometry)
