"""Keys quantised by channel over blocks of tokens, values by token; the newest tokens plain."""

from __future__ import annotations

from dataclasses import dataclass, replace
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
    packed,
    rounded_half,
    ungrouped,
    unpacked,
)
from kvkeep.errors import ShapeError, SpecError
from kvkeep.packing import KernelLayout
from kvkeep.planes import Planes, PlaneSpec


@final
@dataclass(frozen=True)
class Kivi(Codec):
    """x = code * scale + zero, in 4 or 2 bits. Each channel of keys has one scale for a block of
    `together` tokens, because some channels are large in all tokens; `group` elements of a value
    share a scale. The first `sinks` tokens, the newest `recent` tokens, and tokens whose block is
    not full yet are kept plain: the first tokens receive much attention, and their keys would widen
    the range of their block's channels.

    A slot holds `together` tokens. Its planes: "" uint8 (together, D * bits / 8), the first
    elements in the low bits; "_scale" and "_zero" float16, (1, D) for keys, (together, groups) for
    values. Source: KIVI (arXiv 2402.02750).
    """

    bits: int = 4
    together: int = 32
    recent: int = 8
    group: int = 64
    sinks: int = 4
    by_channel: bool = True

    name: ClassVar[str] = "kivi"

    def __post_init__(self) -> None:
        check_group(self.name, self.group)
        if self.bits not in (2, 4) or self.together < 2 or min(self.recent, self.sinks) < 0:
            raise SpecError(
                f"kivi of {self.bits} bits, {self.together} tokens together, {self.recent} recent, "
                f"{self.sinks} sinks: bits must be 2 or 4, together at least 2, recent and sinks "
                "at least 0; use kivi:4"
            )

    @cached_property
    def layout(self) -> KernelLayout:
        group, block = (1, self.together) if self.by_channel else (self.group, 1)
        return KernelLayout(f"int{self.bits}", group, block=block)

    @property
    def block(self) -> int:
        return self.together

    @property
    def tail(self) -> int:
        return self.recent

    def planes(self, dim: int, dtype: torch.dtype) -> dict[str, PlaneSpec]:
        if dim % (8 // self.bits):
            raise ShapeError(
                f"kivi packs {8 // self.bits} elements into a byte, but the width is "
                f"{dim}; use int8"
            )
        values = (self.together, group_count(dim, self.group))
        scale = PlaneSpec((1, dim) if self.by_channel else values, torch.float16)
        codes = PlaneSpec((self.together, dim * self.bits // 8), torch.uint8)
        return {"": codes, "_scale": scale, "_zero": scale}

    def encode(self, x: Tensor) -> Planes:
        self.planes(x.shape[-1], x.dtype)
        blocks = x.reshape(*x.shape[:2], -1, self.together, x.shape[-1])
        axis = 3 if self.by_channel else -1
        groups = blocks.float() if self.by_channel else grouped(blocks.float(), self.group)
        low, high = groups.amin(dim=axis, keepdim=True), groups.amax(dim=axis, keepdim=True)
        zero = rounded_half(low)
        most = 2**self.bits - 1
        scale = rounded_half((high - zero.float()) / most)
        codes = divided(groups - zero.float(), scale).round_().clamp_(0, most)
        if not self.by_channel:
            codes, scale, zero = ungrouped(codes, x.shape[-1]), scale[..., 0], zero[..., 0]
        return {"": packed(codes.to(torch.uint8), self.bits), "_scale": scale, "_zero": zero}

    def decode(self, planes: Planes, dtype: torch.dtype) -> Tensor:
        compute = torch.promote_types(dtype, torch.float32)
        codes = unpacked(planes[""], self.bits).to(compute)
        width = codes.shape[-1]
        scale, zero = planes["_scale"].to(compute), planes["_zero"].to(compute)
        if self.by_channel:
            x = codes * scale + zero
        else:
            x = ungrouped(grouped(codes, self.group) * scale[..., None] + zero[..., None], width)
        return x.flatten(2, 3).to(dtype)

    def width(self, planes: Planes) -> int:
        return planes[""].shape[-1] * 8 // self.bits

    def for_values(self) -> Codec:
        return replace(self, by_channel=False)
