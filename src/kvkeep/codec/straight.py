"""The effect of a lossy codec, with the gradient of the identity."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, final

import torch
from torch import Tensor

from kvkeep.codec.base import Codec
from kvkeep.packing import PLAIN, KernelLayout
from kvkeep.planes import Planes, PlaneSpec


@final
@dataclass(frozen=True)
class StraightThrough(Codec):
    """Slots hold keys and values after encoding and decoding by `inner`, in the input's dtype. The
    backward pass treats this as the identity. For training only: it saves no memory. Source: the
    straight-through estimator (arXiv 1308.3432).
    """

    inner: Codec

    name: ClassVar[str] = "straight_through"
    differentiable: ClassVar[bool] = True

    @cached_property
    def layout(self) -> KernelLayout | None:
        return PLAIN if self.block == 1 else None  # no kernel reads slots of several tokens

    @property
    def block(self) -> int:
        return self.inner.block

    @property
    def tail(self) -> int:
        return self.inner.tail if self.block > 1 else 0  # single tokens are encoded as they arrive

    @property
    def sinks(self) -> int:
        return self.inner.sinks if self.block > 1 else 0

    @property
    def key_warning(self) -> str | None:
        return self.inner.key_warning

    def planes(self, dim: int, dtype: torch.dtype) -> dict[str, PlaneSpec]:
        self.inner.planes(dim, dtype)
        return {"": PlaneSpec((dim,) if self.block == 1 else (self.block, dim), dtype)}

    def encode(self, x: Tensor) -> Planes:
        given = x.detach()
        made = self.inner.decode(self.inner.encode(given), x.dtype) + (x - given)
        if self.block > 1:
            made = made.reshape(*x.shape[:2], -1, self.block, x.shape[3])
        return {"": made}

    def decode(self, planes: Planes, dtype: torch.dtype) -> Tensor:
        made = planes[""].to(dtype)
        return made if self.block == 1 else made.flatten(2, 3)

    def for_values(self) -> Codec:
        return replace(self, inner=self.inner.for_values())
