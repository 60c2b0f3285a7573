"""4 bits per element, with one scale per token and group of elements."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, final

import torch
from torch import Tensor

from kvkeep.codec.base import Codec
from kvkeep.codec.groups import (
    Grouped,
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
from kvkeep.planes import Planes, PlaneSpec

_TOGETHER = 32  # tokens that leave the plain tail at a time


@final
@dataclass(frozen=True)
class Int4(Grouped):
    """x = (code - 8) * scale, or code * scale + zero when `affine`; codes 0..15.

    Planes: "" uint8 (D / 2,), element 2i in the low half of byte i; "_scale" float16
    (groups,), and "_zero" likewise when affine. The symmetric scale has the sign that maps the
    element of largest magnitude to code 0, as llama.cpp's Q4_0 does. Keys are rotated by a Hadamard
    matrix first, unless `hadamard` is False; values are not, because they have no outlier channels.
    The rotation spreads the error of a large channel over all channels but does not reduce it.

    Before that, the mean of the first `centre` tokens is taken out of keys (0: nothing is); see
    `kvkeep.attention.centre`. Where a layer evicts nothing and its storage grows, the first `sinks`
    tokens, the newest `recent` and up to 31 more stay plain, so a chunk's queries read its own
    tokens as they were computed; elsewhere tokens are encoded as they arrive.
    """

    group: int = 32
    affine: bool = False
    hadamard: bool = True
    centre: int = 256
    recent: int = 64
    sinks: int = 4

    name: ClassVar[str] = "int4"
    bits: ClassVar[int] = 4

    def __post_init__(self) -> None:
        check_group(self.name, self.group)
        if min(self.centre, self.recent, self.sinks) < 0:
            raise SpecError(
                f"int4 of centre={self.centre}, recent={self.recent}, sinks={self.sinks}: each is "
                "a number of tokens, or 0; use int4"
            )

    @property
    def key_warning(self) -> str | None:
        if self.centre:
            return None
        return (
            "codec int4 without a centre loses too much precision of keys in models with a few "
            "large key channels (Qwen2.5: a KL of 1.8 nats); use +int8/int4 or leave out centre=0"
        )

    @property
    def together(self) -> int:
        return _TOGETHER if self.recent or self.sinks else 1

    @property
    def tail(self) -> int:
        return self.recent

    def for_values(self) -> Codec:
        return replace(self, hadamard=False, centre=0)

    def planes(self, dim: int, dtype: torch.dtype) -> dict[str, PlaneSpec]:
        if dim % 2:
            raise ShapeError(
                f"int4 packs two elements into a byte, but the width is {dim}; use int8"
            )
        scale = PlaneSpec((group_count(dim, self.group),), torch.float16)
        planes = {"": PlaneSpec((dim // 2,), torch.uint8), "_scale": scale}
        return planes | ({"_zero": scale} if self.affine else {})

    def encode_in_steps(self, x: Tensor) -> Planes:
        groups = grouped(self.rotate(x), self.group)
        low, high = groups.aminmax(dim=-1)
        if self.affine:
            zero = rounded_half(low)
            scale = rounded_half((high - zero.to(high.dtype)) / 15)
            codes = divided(groups - zero.to(high.dtype)[..., None], scale[..., None])
            more = {"_zero": zero}
        else:
            scale = rounded_half(torch.where(high > -low, high, low) / -8)
            codes = divided(groups, scale[..., None]) + 8
            more = {}
        codes = ungrouped(codes.round_().clamp_(0, 15), x.shape[-1]).to(torch.uint8)
        return {"": packed(codes, 4), "_scale": scale} | more

    def decode(self, planes: Planes, dtype: torch.dtype) -> Tensor:
        compute = torch.promote_types(dtype, torch.float32)
        codes = unpacked(planes[""], 4).to(compute)
        scale = planes["_scale"].to(compute)[..., None]
        width = codes.shape[-1]
        if self.affine:
            x = grouped(codes, self.group) * scale + planes["_zero"].to(compute)[..., None]
        else:
            x = grouped(codes - 8, self.group) * scale
        return self.rotate(ungrouped(x, width)).to(dtype)

    def width(self, planes: Planes) -> int:
        return planes[""].shape[-1] * 2
