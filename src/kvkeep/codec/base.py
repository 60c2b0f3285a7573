"""The contract of a codec: how one slot's key or value is encoded. Pure functions on planes."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cache, cached_property
from typing import ClassVar

import torch
from torch import Tensor

from kvkeep.errors import PrecisionWarning
from kvkeep.packing import KernelLayout
from kvkeep.planes import Planes, PlaneSpec


@dataclass(frozen=True)
class Codec(ABC):
    """Stateless; fields are the options of its spec.

    Plane names are what follows `k` or `v`: "" is the main plane, "_scale" another.
    """

    name: ClassVar[str]
    differentiable: ClassVar[bool] = False
    """Whether gradients flow through what was encoded."""

    @property
    def block(self) -> int:
        """Tokens that are encoded together, in one slot; their planes have a token axis then. 1:
        each token has a slot of its own, which may be rewritten."""
        return 1

    @property
    def tail(self) -> int:
        """How many of the newest tokens stay as they were given, at least."""
        return 0

    @cached_property
    def layout(self) -> KernelLayout | None:
        """How its planes lie, for kernels that read them without decoding; None: no kernel can, and
        `decode` comes first."""
        return None

    @property
    def rewritable(self) -> bool:
        """Whether one token may be rewritten without touching its neighbours."""
        return self.block == 1

    @property
    def caution(self) -> str | None:
        """What speaks against this codec for keys, and what to use; None: nothing that is known."""
        return None

    @abstractmethod
    def planes(self, dim: int, dtype: torch.dtype) -> dict[str, PlaneSpec]:
        """The planes that hold one slot of a tensor of width `dim` given in `dtype`."""

    @abstractmethod
    def encode(self, x: Tensor) -> Planes:
        """Encode x (B, H, n, D); may be a view of it. n is a multiple of `block`."""

    def encode_into(self, x: Tensor, planes: Planes, prefix: str) -> None:
        """Encode x into planes of its n slots, whose names begin with `prefix`."""
        for name, plane in self.encode(x).items():
            planes[prefix + name].copy_(plane)

    @abstractmethod
    def decode(self, planes: Planes, dtype: torch.dtype) -> Tensor:
        """Decode to (B, H, S, D) in `dtype`; may be a view of the planes."""

    def width(self, planes: Planes) -> int:
        """D of the tensor that these planes hold."""
        return planes[""].shape[-1]

    def for_values(self) -> Codec:
        """This codec for values, where it serves them otherwise than keys."""
        return self

    def rotate(self, q: Tensor) -> Tensor:
        """Queries (..., D) as keys under this codec need them: encoded keys may stand for R k with
        an orthonormal R, and q . k = R q . R k. In at least float32 where it is not q itself."""
        return q


def caution(codec: Codec) -> None:
    """Give the PrecisionWarning of a codec that is to encode keys, if it has one."""
    if codec.caution is not None:
        _warn_once(codec.caution)


@cache  # once in a process, not once for each of a model's layers
def _warn_once(text: str) -> None:
    warnings.warn(text, PrecisionWarning, stacklevel=4)
