"""8 bits per element, with one scale per token and group of elements."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from kvkeep.codec.groups import (
    Grouped,
    check_group,
    divided,
    group_count,
    grouped,
    rounded_half,
    ungrouped,
)
from kvkeep.planes import Planes, PlaneSpec


@final
@dataclass(frozen=True)
class Int8(Grouped):
    """x = code * scale, codes -127..127, with one scale for each token and group of elements.

    Planes: "" int8 (D,), "_scale" float16 (groups,). Absolute-maximum quantisation, as in LLM.int8
    (arXiv 2208.07339). Keys are rotated by a Hadamard matrix first, unless `hadamard` is False;
    values are not rotated, because they have no outlier channels.
    """

    group: int = 64
    hadamard: bool = True

    name: ClassVar[str] = "int8"
    bits: ClassVar[int] = 8

    def __post_init__(self) -> None:
        check_group(self.name, self.group)

    def planes(self, dim: int, dtype: torch.dtype) -> dict[str, PlaneSpec]:
        return {
            "": PlaneSpec((dim,), torch.int8),
            "_scale": PlaneSpec((group_count(dim, self.group),), torch.float16),
        }

    def encode_in_steps(self, x: Tensor) -> Planes:
        groups = grouped(self.rotate(x), self.group)
        scale = rounded_half(groups.abs().amax(dim=-1) / 127)
        codes = divided(groups, scale[..., None]).round_().clamp_(-127, 127)
        return {"": ungrouped(codes, x.shape[-1]).to(torch.int8), "_scale": scale}

    def decode(self, planes: Planes, dtype: torch.dtype) -> Tensor:
        codes = planes[""]
        compute = torch.promote_types(dtype, torch.float32)
        x = grouped(codes.to(compute), self.group) * planes["_scale"].to(compute)[..., None]
        return self.rotate(ungrouped(x, codes.shape[-1])).to(dtype)
