"""Values that are the first elements of their keys, so that slots hold both once."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, final

import torch
from torch import Tensor

from kvkeep.codec.base import Codec
from kvkeep.packing import KernelLayout
from kvkeep.planes import Planes, PlaneSpec


@final
@dataclass(frozen=True)
class WithinKeys(Codec):
    """The codec of values that are the first `prefix` elements of their keys, as in latent
    attention (DeepSeek-V2, arXiv 2405.04434). It has no planes: it decodes the planes of the keys,
    which `keys` has encoded without a rotation.
    """

    keys: Codec
    prefix: int

    name: ClassVar[str] = "within_keys"
    of_keys: ClassVar[bool] = True
    differentiable: ClassVar[bool] = True

    @cached_property
    def layout(self) -> KernelLayout | None:
        return self.keys.layout

    @property
    def block(self) -> int:
        return self.keys.block

    @property
    def tail(self) -> int:
        return self.keys.tail

    @property
    def sinks(self) -> int:
        return self.keys.sinks

    def with_tail(self, recent: int, sinks: int) -> Codec:
        return replace(self, keys=self.keys.with_tail(recent, sinks))

    def waiting(self, plain: Codec) -> Codec:
        return replace(self, keys=self.keys.waiting(plain))

    def planes(self, dim: int, dtype: torch.dtype) -> dict[str, PlaneSpec]:
        return {}

    def encode(self, x: Tensor) -> Planes:
        return {}

    def decode(self, planes: Planes, dtype: torch.dtype) -> Tensor:
        return self.keys.decode(planes, dtype)[..., : self.prefix]

    def width(self, planes: Planes) -> int:
        return self.prefix
