"""Base of several codecs: groups of elements with one scale each, and packed bits."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from functools import cached_property
from struct import Struct
from typing import ClassVar

import torch
from torch import Tensor

from kvkeep.codec.base import Codec
from kvkeep.codec.hadamard import hadamard
from kvkeep.errors import SpecError
from kvkeep.native_library import LIBRARY, TYPES
from kvkeep.packing import HIGH_HALF, PACKINGS, KernelLayout, Packing
from kvkeep.planes import Planes

_MOST_HALF = 65504.0  # the largest float16
_MOST_E5M2 = 57344.0


def check_group(codec: str, group: int) -> None:
    """Raise SpecError unless a group is a positive multiple of 8 elements, as kernels require."""
    if group < 8 or group % 8:
        raise SpecError(
            f"{codec} group of {group} elements: it must be a multiple of 8; use {codec}:64"
        )


def group_count(dim: int, group: int) -> int:
    """The number of groups in a token of width `dim`; the last group may be shorter."""
    return -(-dim // group)


def grouped(x: Tensor, group: int) -> Tensor:
    """x (..., D) as (..., groups, group), in float32 or float64. A short last group is padded with
    its first element, which changes neither its minimum nor its maximum."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    width, groups = x.shape[-1], group_count(x.shape[-1], group)
    missing = groups * group - width
    if missing:
        first = x[..., (groups - 1) * group :][..., :1]
        x = torch.cat([x, first.expand(*x.shape[:-1], missing)], dim=-1)
    return x.reshape(*x.shape[:-1], groups, group)


def ungrouped(x: Tensor, dim: int) -> Tensor:
    """The inverse of `grouped`: (..., groups, group) -> (..., D)."""
    return x.flatten(-2)[..., :dim]


def rounded_half(x: Tensor) -> Tensor:
    """A scale or zero point as float16, clamped to its range. A non-finite input becomes NaN, so
    that the fault stays visible."""
    finite = x.where(x.isfinite(), torch.nan)
    return finite.clamp(-_MOST_HALF, _MOST_HALF).to(torch.float16)


def rounded_scale(x: Tensor, bits: int) -> Tensor:
    """A scale as float16; if `bits` is 8, as uint8, the high byte of a float16."""
    if bits == 16:
        return rounded_half(x)
    half = rounded_half(x).clamp(-_MOST_E5M2, _MOST_E5M2)
    return half.to(torch.float8_e5m2).view(torch.uint8)


def scale_values(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The inverse of `rounded_scale`."""
    return (scale.view(torch.float8_e5m2) if scale.dtype is torch.uint8 else scale).to(dtype)


def divided(x: Tensor, scale: Tensor) -> Tensor:
    """x / scale, and 0 where the scale is 0 or NaN."""
    return torch.nan_to_num(x / scale.to(x.dtype), nan=0.0, posinf=0.0, neginf=0.0)


def packed(codes: Tensor, bits: int) -> Tensor:
    """Codes uint8 (..., D) below 2 ** bits -> (..., D * bits / 8); a byte's first code is in its
    low bits."""
    parts = codes.reshape(*codes.shape[:-1], -1, 8 // bits)
    out = parts[..., 0]
    for i in range(1, 8 // bits):
        out = out | (parts[..., i] << (bits * i))
    return out


def unpacked(planes: Tensor, bits: int) -> Tensor:
    """The inverse of `packed`."""
    parts = [(planes >> shift) & (2**bits - 1) for shift in range(0, 8, bits)]
    return torch.stack(parts, dim=-1).flatten(-2)


def packed_as(codes: Tensor, packing: Packing) -> Tensor:
    """Codes uint8 (..., D) -> (..., D * bits / 8) bytes."""
    if not packing.low:
        return packed(codes, packing.bits)
    wide = codes if packing.wide == 8 else packed(codes, packing.wide)
    low, high = packing.planes
    first, second = (_folded(wide, *x, packing.wide) for x in ((low, 0), (high, low)))
    return torch.cat([first, second], dim=-1)


def unpacked_as(plane: Tensor, packing: Packing) -> Tensor:
    """The inverse of `packed_as`."""
    if not packing.low:
        return unpacked(plane, packing.bits)
    low, high = packing.planes
    first = plane.shape[-1] * low // packing.bits
    wide = _unfolded(plane[..., :first], low, packing.wide)
    wide = wide | _unfolded(plane[..., first:], high, packing.wide) << low
    return wide if packing.wide == 8 else unpacked(wide, packing.wide)


def _folded(wide: Tensor, bits: int, first: int, width: int) -> Tensor:
    """A plane of `bits` bits, from bit `first` on, of codes packed at `width` bits."""
    parts = (wide >> first & _mask(bits, width)).chunk(width // bits, dim=-1)
    out = parts[0]
    for i in range(1, len(parts)):
        out = out | (parts[i] << (bits * i))
    return out


def _unfolded(plane: Tensor, bits: int, width: int) -> Tensor:
    """The inverse of `_folded`, with the bits at bit 0."""
    mask = _mask(bits, width)
    return torch.cat([plane >> shift & mask for shift in range(0, width, bits)], dim=-1)


def _mask(bits: int, width: int) -> int:
    """The lowest `bits` bits of each code in a byte."""
    return ((1 << bits) - 1) * (0x11 if width == 4 else 1)


@dataclass(frozen=True)
class Grouped(Codec):
    """Codes of 8 bits or fewer with scales per group. On the CPU the native library encodes a
    tensor in one call; if x is halfway between two codes, it may round to a different code than
    tensor operations.
    """

    bits: ClassVar[int]
    group: int
    hadamard: bool

    @cached_property
    def layout(self) -> KernelLayout:
        return KernelLayout(self.name, self.group, self.hadamard)

    def encode(self, x: Tensor) -> Planes:
        planes = self.planes(x.shape[3], x.dtype)
        if not _compiled(x):
            return self.encode_in_steps(x)
        front = x.shape[:3]
        into = {
            name: x.new_empty((*front, *spec.shape), dtype=spec.dtype)
            for name, spec in planes.items()
        }
        self.encode_into(x, into, "")
        return into

    def encode_into(self, x: Tensor, planes: Planes, prefix: str) -> None:
        if not _compiled(x):
            super().encode_into(x, planes, prefix)
            return
        assert LIBRARY is not None
        if x.stride(3) != 1:
            x = x.contiguous()
        if LIBRARY.kv_encode(ENCODING.pack(*encoding(x, planes, prefix, self.layout))):
            raise MemoryError(f"no scratch memory to encode {x.shape[2]} tokens")

    @abstractmethod
    def encode_in_steps(self, x: Tensor) -> Planes:
        """`encode` by tensor operations, on any device and for any floating-point type."""

    def for_values(self) -> Codec:
        return replace(self, hadamard=False)

    def rotate(self, q: Tensor) -> Tensor:
        return hadamard(q) if self.hadamard else q


ENCODING = Struct("=27q")
"""KvEncoding of native/abi.h."""

_ABSENT = (0, 0, 0, 0)


def encoding(x: Tensor, planes: Planes, prefix: str, layout: KernelLayout) -> tuple[int, ...]:
    """The fields of a KvEncoding that writes tokens x (B, H, n, D) to the first n slots of
    `planes`. Names of planes begin with `prefix`."""
    scale, zero = planes.get(prefix + "_scale"), planes.get(prefix + "_zero")
    return (
        *_plane(x),
        TYPES[x.dtype],
        *_plane(planes[prefix]),
        PACKINGS[layout.packing].number if layout.group else TYPES[x.dtype],
        *(_ABSENT if scale is None else _plane(scale)),
        HIGH_HALF if layout.scale == 8 else 0,
        *(_ABSENT if zero is None else _plane(zero)),
        0,
        *x.shape,
        layout.group,
        layout.hadamard,
        0,
    )


def _compiled(x: Tensor) -> bool:
    """Whether the native library can encode x."""
    here = LIBRARY is not None and x.is_cpu and x.dtype in TYPES
    return here and not torch.compiler.is_compiling()


def _plane(x: Tensor) -> tuple[int, int, int, int]:
    """A KvPlane without its type."""
    row, head, slot, _ = x.stride()
    return x.data_ptr(), row, head, slot
