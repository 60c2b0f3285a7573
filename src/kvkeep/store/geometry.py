"""ModelGeometry: shapes and dtypes of a model's stored slots."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from kvkeep.cache import Cache
from kvkeep.geometry import Geometry
from kvkeep.layer.layer import LayerCache
from kvkeep.layer.recurrent import StateSpec
from kvkeep.layer.stats import slot_planes
from kvkeep.planes import OwnWindow, Planes, PlaneSpec, Reach
from kvkeep.policy import KeepAll


@dataclass(frozen=True)
class LayerGeometry:
    """The geometry of a layer's stored slots.

    Args:
        of_row: the layer's geometry, for one row.
        planes: the planes of its slots.
        tail: the planes of the slots of its plain tail; empty: it has none.
        ragged: whether heads may keep different numbers of tokens.
        centred: whether keys have a `Centre`.
        window: the window in which slots are needed; None: all slots are needed.
    """

    of_row: Geometry
    planes: Mapping[str, PlaneSpec]
    tail: Mapping[str, PlaneSpec] = field(default_factory=dict)
    ragged: bool = False
    centred: bool = False
    window: OwnWindow | None = None

    @classmethod
    def of(cls, layer: LayerCache, geometry: Geometry) -> LayerGeometry:
        """The geometry of a layer with keys and values of `geometry`."""
        planes = planes_of(layer, geometry)
        own, centred = geometry._replace(rows=1), bool(layer.key_codec.centre)
        late, plain = layer.slots.late, layer.codecs.unencoded
        tail = slot_planes(layer.policy, *plain, geometry) if late else {}
        return cls(own, planes, tail, layer.policy.ragged, centred, window_in(layer))

    def needed(self, tokens: Tensor) -> Tensor:
        """The first position whose slot is needed after `tokens` tokens; int64, of any shape."""
        if self.window is None:
            return torch.zeros_like(tokens)
        first: Tensor = tokens - self.window.behind(tokens) + 1
        return first.clamp(min=0)

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot."""
        return sum(spec.slot_bytes(self.of_row.heads) for spec in self.planes.values())

    @property
    def centre(self) -> tuple[tuple[int, ...], torch.dtype] | None:
        """Shape and dtype of `History.centre`; None: the layer has none."""
        shape = (1, self.of_row.heads, 2, self.of_row.key_width)
        return (shape, torch.float32) if self.centred else None

    def why_not(self, planes: Planes, heads: int, slots: int, *, tail: bool = False) -> str:
        """Why planes do not hold `slots` slots of `heads` heads, or of the tail; empty if they
        do."""
        specs = self.tail if tail else self.planes
        if planes.keys() != specs.keys():
            return f" has planes {sorted(planes)}, not {sorted(specs)}"
        for name, spec in specs.items():
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
    def windowed(self) -> bool:
        """Whether some layers keep a window."""
        return any(layer.window is not None for layer in self.layers)

    @property
    def state_bytes(self) -> int:
        """Bytes of the recurrent states at a mark."""
        return sum(spec.nbytes for spec in self.states.values())

    def text_bytes(self, tokens: int) -> int:
        """Bytes of the slots of a text in all layers, with one window in layers that have one."""
        return sum(layer.slot_bytes * min(tokens, layer.window or tokens) for layer in self.layers)

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


FindGeometry = Callable[[], ModelGeometry]
"""Finds the geometry of a model, which may take a forward."""


def window_in(layer: LayerCache) -> OwnWindow | None:
    """A layer's own window, if its policy keeps exactly the slots in it; otherwise None."""
    window = layer.window
    return window if window is not None and layer.policy.reach == Reach(window) else None


def planes_of(layer: LayerCache, geometry: Geometry) -> dict[str, PlaneSpec]:
    """The stored planes of a layer, for keys and values of `geometry`; the scores of an evicting
    policy are not stored."""
    policy = KeepAll() if layer.policy.evicts else layer.policy
    return slot_planes(policy, layer.key_codec, layer.value_codec, geometry)
