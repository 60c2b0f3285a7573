"""The identity codec: keys and values are stored as the model computed them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, final

import torch
from torch import Tensor

from kvkeep.codec.base import Codec
from kvkeep.packing import PLAIN, KernelLayout
from kvkeep.planes import Planes, PlaneSpec


@final
@dataclass(frozen=True)
class Plain(Codec):
    """Lossless. Encoding copies nothing; decoding copies only to change the dtype."""

    name: ClassVar[str] = "plain"
    differentiable: ClassVar[bool] = True

    @cached_property
    def layout(self) -> KernelLayout:
        return PLAIN

    def planes(self, dim: int, dtype: torch.dtype) -> dict[str, PlaneSpec]:
        return {"": PlaneSpec((dim,), dtype)}

    def encode(self, x: Tensor) -> Planes:
        return {"": x}

    def decode(self, planes: Planes, dtype: torch.dtype) -> Tensor:
        return planes[""].to(dtype)
