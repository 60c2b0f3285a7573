"""8-bit floating point, with one scale per token and group of elements."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, final

import torch
from torch import Tensor

from kvkeep.codec.base import Codec
from kvkeep.codec.groups import (
    check_group,
    divided,
    group_count,
    grouped,
    rounded_half,
    ungrouped,
)
from kvkeep.packing import KernelLayout
from kvkeep.planes import Planes, PlaneSpec

_MOST = 448.0


@final
@dataclass(frozen=True)
class Fp8(Codec):
    """x = code * scale; codes are E4M3 (4 bits of exponent, 3 of fraction), at most 448.

    Planes: "" uint8 (D,), the bits of float8_e4m3fn; "_scale" float16 (groups,). The Triton kernels
    read them; other backends of attention decode them first. Source: FP8 formats (arXiv
    2209.05433).
    """

    group: int = 64

    name: ClassVar[str] = "fp8"

    def __post_init__(self) -> None:
        check_group(self.name, self.group)

    @cached_property
    def layout(self) -> KernelLayout:
        return KernelLayout(self.name, self.group)

    def planes(self, dim: int, dtype: torch.dtype) -> dict[str, PlaneSpec]:
        scale = PlaneSpec((group_count(dim, self.group),), torch.float16)
        return {"": PlaneSpec((dim,), torch.uint8), "_scale": scale}

    def encode(self, x: Tensor) -> Planes:
        groups = grouped(x, self.group)
        scale = rounded_half(groups.abs().amax(dim=-1) / _MOST)
        codes = divided(groups, scale[..., None]).clamp_(-_MOST, _MOST)
        codes = ungrouped(codes, x.shape[-1]).to(torch.float8_e4m3fn)
        return {"": codes.view(torch.uint8), "_scale": scale}

    def decode(self, planes: Planes, dtype: torch.dtype) -> Tensor:
        codes = planes[""].view(torch.float8_e4m3fn)
        compute = torch.promote_types(dtype, torch.float32)
        x = grouped(codes.to(compute), self.group) * planes["_scale"].to(compute)[..., None]
        return ungrouped(x, codes.shape[-1]).to(dtype)
