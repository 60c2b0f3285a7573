"""ModelGeometry: what the slots of one identity are like, as the model says, not a block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvkeep.cache import Cache
from kvkeep.checks import empty_like
from kvkeep.layer.history import nothing_of
from kvkeep.layer.layer import LayerCache
from kvkeep.layer.stats import slot_planes
from kvkeep.planes import POSITION, PlaneSpec

if TYPE_CHECKING:
    from kvkeep.store.backend import Block

Likes = Sequence[tuple[Tensor, Tensor]]
"""Of each layer, no keys and no values, (1, H, 0, D)."""


@dataclass(frozen=True)
class LayerGeometry:
    """Heads, widths, dtype and device of a layer's keys and values, and the planes of its slots."""

    heads: int
    key_width: int
    value_width: int
    dtype: torch.dtype
    device: torch.device
    planes: Mapping[str, PlaneSpec]

    @classmethod
    def of(cls, layer: LayerCache, like: tuple[Tensor, Tensor]) -> LayerGeometry:
        """That of a layer which is fed such keys and values."""
        k, v = like
        found = (k.shape[1], k.shape[3], v.shape[3], k.dtype, k.device)
        return cls(*found, planes_of(layer, like))


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
    def of(cls, layers: Sequence[LayerCache], likes: Likes, routed: bool | None) -> ModelGeometry:
        """That of a cache's layers which are fed such keys and values."""
        return cls(tuple(map(LayerGeometry.of, layers, likes)), routed)

    @classmethod
    def of_cache(cls, cache: Cache) -> ModelGeometry:
        """That of a cache that was fed something."""
        likes = [layer.ledger.like for layer in cache.layers]
        like = [(empty_like(k[:1]), empty_like(v[:1])) for k, v in filter(None, likes)]
        return cls.of(cache.layers, like, cache.routed)

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's slots in all layers."""
        return sum(
            spec.slot_bytes(layer.heads) for layer in self.layers for spec in layer.planes.values()
        )

    @cached_property
    def likes(self) -> Likes:
        """Of each layer, no keys and no values, (1, H, 0, D), on its device."""
        found = []
        for one in self.layers:
            k, v = nothing_of(1, one.heads, one.key_width, one.value_width, one.dtype)
            found.append((k.to(one.device), v.to(one.device)))
        return found

    def why_not(self, block: Block, start: int) -> str:
        """Why a block whose first token has a position cannot be of this geometry; empty if it
        can."""
        if block.routed != self.routed:
            return f"it was computed with routed={block.routed}, not {self.routed}"
        if len(block.likes) != len(self.layers):
            return f"it has {len(block.likes)} layers, not {len(self.layers)}"
        n = len(block.tokens)
        position = torch.arange(start, start + n, dtype=torch.int32)
        for index, (layer, (k, v), planes) in enumerate(
            zip(self.layers, block.likes, block.stretch.layers, strict=True)
        ):
            said = (k.shape[1], k.shape[3], v.shape[3], k.dtype)
            own = (layer.heads, layer.key_width, layer.value_width, layer.dtype)
            if said != own:
                return f"layer {index} is of {said}, not {own}"
            if planes.keys() != layer.planes.keys():
                return f"layer {index} has planes {sorted(planes)}, not {sorted(layer.planes)}"
            for name, spec in layer.planes.items():
                shape = (1, 1 if spec.shared else layer.heads, n, *spec.shape)
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
        first = self.layers[0]
        return (
            f"{len(self.layers)} layers, the first of {first.heads} heads of "
            f"{first.key_width}/{first.value_width}, {first.dtype} on {first.device}, planes "
            f"{', '.join(first.planes)}, routed={self.routed}"
        )


def planes_of(layer: LayerCache, like: tuple[Tensor, Tensor]) -> dict[str, PlaneSpec]:
    """The planes of a layer's slots, for keys and values like these."""
    (k, v), codecs = like, (layer.key_codec, layer.value_codec)
    return slot_planes(layer.policy, *codecs, k.shape[3], v.shape[3], k.dtype)
