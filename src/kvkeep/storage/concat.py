"""Storage by concatenation: every append copies all slots to new tensors."""

from __future__ import annotations

from typing import ClassVar, final

import torch
from torch import Tensor

from kvkeep.planes import Planes, along_slots, concatenated, survivors, take
from kvkeep.storage.base import Storage


@final
class Concat(Storage):
    """Never changes a tensor in place, so autograd works: the reference for all other storages, and
    the baseline of the benchmarks. An append costs O(length).

    Earlier results of `read` keep their contents. Source: transformers' DynamicCache, candle's
    ConcatKvCache.
    """

    name: ClassVar[str] = "concat"
    differentiable: ClassVar[bool] = True

    @property
    def length(self) -> int:
        planes = self._planes
        return next(iter(planes.values())).shape[2] if planes else 0

    def append(self, planes: Planes) -> slice:
        start = self.length
        if self._planes:
            self._planes = concatenated(self._planes, planes)
            self.reallocations += 1
        else:
            self._planes = {
                name: plane.clone(memory_format=torch.contiguous_format)
                for name, plane in planes.items()
            }
        return slice(start, self.length)

    def write(self, slots: Tensor, planes: Planes) -> None:
        self._planes = {
            name: plane.scatter(2, along_slots(slots, plane), planes[name])
            for name, plane in self._planes.items()
        }

    def write_plane(self, name: str, plane: Tensor) -> None:
        self._planes = {**self._planes, name: plane.clone()}

    def read(self) -> Planes:
        return dict(self._planes)

    def evict(self, victims: Tensor) -> None:
        self._planes = take(self._planes, self.remaining(victims, self.length))

    def remaining(self, victims: Tensor, length: int) -> Tensor:
        """As `Storage.remaining`: the slots keep their order."""
        return survivors(victims, length)

    def truncate(self, length: int) -> None:
        # Cloned, so that the memory of the truncated slots is freed.
        self._planes = {name: plane[:, :, :length].clone() for name, plane in self._planes.items()}

    def rows(self, index: Tensor) -> None:
        self._planes = {
            name: torch.index_select(plane, 0, index) for name, plane in self._planes.items()
        }

    def reset(self) -> None:
        self._planes = {}
