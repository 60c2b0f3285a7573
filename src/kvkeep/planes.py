"""Planes: the named per-slot tensors of a layer, and what may be done to all of them alike.

A plane is a tensor (B, H, S, ...): batch rows, kv heads, slots, then whatever one slot holds. A
plane shared by all heads has H = 1. Scores, scales and positions are planes like keys and values,
so one function moves them all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

Planes = Mapping[str, Tensor]
"""Plane name -> tensor (B, H|1, S, ...)."""

Slots = slice | Tensor
"""A run of slots, or int64 indices (B|1, H|1, n) along axis 2."""

POSITION = "position"
"""The plane every layer has: int32 (B, 1|H, S), -1 marks an empty slot."""


@dataclass(frozen=True)
class PlaneSpec:
    """What one slot holds in one plane.

    `shape` is the trailing shape after (B, H, S); `shared` planes have H = 1.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    shared: bool = False


@dataclass(frozen=True)
class Reach:
    """How far back a query sees: the last `size` positions, its own among them, and `sinks` more.

    A slot at position p is within reach of a query at position t when t - p < size or p < sinks.
    """

    size: int
    sinks: int = 0


@final
class Front(Planes):
    """The first `length` slots of larger planes, each a view made when it is first asked for."""

    def __init__(self, planes: Planes, length: int) -> None:
        self.whole = dict(planes)
        self.length = length
        self._views: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        view = self._views.get(name)
        if view is None:
            view = self._views[name] = self.whole[name].narrow(2, 0, self.length)
        return view

    def __iter__(self) -> Iterator[str]:
        return iter(self.whole)

    def __len__(self) -> int:
        return len(self.whole)


def part(planes: Planes, prefix: str) -> Planes:
    """The planes of one encoded tensor: `k` and `k_*` for prefix "k", keyed by what follows it."""
    return {
        name[len(prefix) :]: planes[name]
        for name in planes
        if name == prefix or name.startswith(prefix + "_")
    }


def joined(planes: Planes, prefix: str) -> dict[str, Tensor]:
    """The inverse of `part`: each plane's name with the prefix in front."""
    return {prefix + name: plane for name, plane in planes.items()}


def along_slots(index: Tensor, plane: Tensor) -> Tensor:
    """Slot indices (B|1, H|1, n), expanded to `plane` (B, H, S, ...) for gather and scatter."""
    trailing = plane.shape[3:]
    index = index.reshape(*index.shape, *(1 for _ in trailing))
    return index.expand(plane.shape[0], plane.shape[1], -1, *trailing)


def take(planes: Planes, index: Tensor) -> dict[str, Tensor]:
    """Copy the slots `index` (B|1, H|1, n) out of every plane, in that order."""
    return {name: plane.gather(2, along_slots(index, plane)) for name, plane in planes.items()}


def concatenated(first: Planes, second: Planes) -> dict[str, Tensor]:
    """Both sets of slots, `first` before `second`, as new tensors."""
    return {name: torch.cat([plane, second[name]], dim=2) for name, plane in first.items()}


def marked(slots: Tensor, length: int) -> Tensor:
    """Slot indices (B|1, H|1, n) as a bool mask (B|1, H|1, length)."""
    mask = torch.zeros(*slots.shape[:2], length, dtype=torch.bool, device=slots.device)
    return mask.scatter_(2, slots, True)


def survivors(victims: Tensor, length: int) -> Tensor:
    """Slots that are not victims, in slot order.

    `victims` is int64 (B|1, H|1, c) without repeats; returns int64 (B|1, H|1, length - c).
    """
    order = torch.sort(marked(victims, length).to(torch.uint8), dim=2, stable=True).indices
    return order[:, :, : length - victims.shape[2]]


def unsliced(planes: Planes) -> Planes:
    """Planes of which these are the first slots: what is needed for types, strides and addresses,
    without making views."""
    return planes.whole if type(planes) is Front else planes


def slot_count(planes: Planes) -> int:
    """S of a set of planes; 0 when there are none."""
    if type(planes) is Front:  # isinstance asks an abstract class, which is slow
        return planes.length
    for plane in planes.values():
        return plane.shape[2]
    return 0


def plane_bytes(planes: Planes) -> int:
    """Bytes of all slots in all rows, heads and planes together."""
    return sum(plane.element_size() * plane.numel() for plane in planes.values())
