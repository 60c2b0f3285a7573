"""ModelGeometry: shapes and dtypes of a model's stored slots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from kvkeep.cache import Cache
from kvkeep.geometry import Geometry
from kvkeep.layer.layer import LayerCache
from kvkeep.layer.recurrent import StateSpec
from kvkeep.layer.stats import slot_planes
from kvkeep.planes import Planes, PlaneSpec
from kvkeep.policy import KeepAll


@dataclass(frozen=True)
class LayerGeometry:
    """A layer's geometry for one row, the planes of its slots, whether its heads may keep different
    numbers of tokens, and whether its keys lack a mean (`Centre`)."""

    of_row: Geometry
    planes: Mapping[str, PlaneSpec]
    ragged: bool = False
    centred: bool = False

    @classmethod
    def of(cls, layer: LayerCache, geometry: Geometry) -> LayerGeometry:
        """The geometry of a layer with keys and values of `geometry`."""
        planes = planes_of(layer, geometry)
        own, centred = geometry._replace(rows=1), bool(layer.key_codec.centre)
        return cls(own, planes, layer.policy.ragged, centred)

    @property
    def centre(self) -> tuple[tuple[int, ...], torch.dtype] | None:
        """Shape and dtype of `History.centre`; None: the layer has none."""
        shape = (1, self.of_row.heads, self.of_row.key_width)
        return (shape, torch.float32) if self.centred else None

    def why_not(self, planes: Planes, heads: int, slots: int) -> str:
        """Why planes do not hold `slots` slots of `heads` heads; empty if they do."""
        if planes.keys() != self.planes.keys():
            return f" has planes {sorted(planes)}, not {sorted(self.planes)}"
        for name, spec in self.planes.items():
            shape, x = (1, 1 if spec.shared else heads, slots, *spec.shape), planes[name]
            if (tuple(x.shape), x.dtype) != (shape, spec.dtype):
                return f", plane {name} is {tuple(x.shape)} {x.dtype}, not {shape} {spec.dtype}"
        return ""


@dataclass(frozen=True)
class ModelGeometry:
    """The common geometry of all entries of an identity, determined by the model.

    Args:
        layers: the geometry of each attention layer.
        routed: see `kvkeep.cache.Cache.routed`.
        states: shape and dtype of each recurrent state, by name.
    """

    layers: tuple[LayerGeometry, ...]
    routed: bool | None
    states: Mapping[str, StateSpec] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        layers: Sequence[LayerCache],
        geometries: Sequence[Geometry],
        routed: bool | None,
        states: Mapping[str, StateSpec],
    ) -> ModelGeometry:
        """The geometry of a cache's layers with keys and values of `geometries`."""
        return cls(tuple(map(LayerGeometry.of, layers, geometries)), routed, states)

    @classmethod
    def of_cache(cls, cache: Cache) -> ModelGeometry:
        """The geometry of a cache that is not empty."""
        geometries = [layer.history.geometry for layer in cache.layers]
        known = list(filter(None, geometries))
        return cls.of(cache.layers, known, cache.routed, cache.carried.specs)

    @property
    def state_bytes(self) -> int:
        """Bytes of the recurrent states at a mark."""
        return sum(spec.nbytes for spec in self.states.values())

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
        """The geometry of each layer for one row, on its device."""
        return [layer.of_row for layer in self.layers]

    def __str__(self) -> str:
        planes, first = self.layers[0].planes, self.layers[0].of_row
        return (
            f"{len(self.layers)} layers, the first of {first.heads} heads of "
            f"{first.key_width}/{first.value_width}, {first.dtype} on {first.device}, planes "
            f"{', '.join(planes)}, routed={self.routed}"
        )


def planes_of(layer: LayerCache, geometry: Geometry) -> dict[str, PlaneSpec]:
    """The stored planes of a layer, for keys and values of `geometry`; the scores of an evicting
    policy are not stored."""
    policy = KeepAll() if layer.policy.evicts else layer.policy
    return slot_planes(policy, layer.key_codec, layer.value_codec, geometry)
