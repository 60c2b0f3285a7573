"""The contract of a codec: how one slot's key or value is encoded. Pure functions on planes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvkeep.planes import Planes, PlaneSpec


@dataclass(frozen=True)
class Codec(ABC):
    """Stateless; fields are the options of its spec.

    Plane names are what follows `k` or `v`: "" is the main plane, "_scale" another.
    """

    name: ClassVar[str]
    rewritable: ClassVar[bool] = True
    """Whether one slot may be rewritten without touching its neighbours."""

    @abstractmethod
    def planes(self, dim: int, dtype: torch.dtype) -> dict[str, PlaneSpec]:
        """The planes that hold one tensor of width `dim` given in `dtype`."""

    @abstractmethod
    def encode(self, x: Tensor) -> Planes:
        """Encode x (B, H, n, D); may be a view of it."""

    @abstractmethod
    def decode(self, planes: Planes, dtype: torch.dtype) -> Tensor:
        """Decode to (B, H, S, D) in `dtype`; may be a view of the planes."""
