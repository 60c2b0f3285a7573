"""Shared by codecs: groups of elements with a float16 scale each, and packed bits."""

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
from kvkeep.packing import PLAIN, KernelLayout
from kvkeep.planes import Planes

_MOST_HALF = 65504.0  # the largest float16


def check_group(codec: str, group: int) -> None:
    """Raise SpecError unless a group is a positive multiple of 8 elements, as kernels need."""
    if group < 8 or group % 8:
        raise SpecError(
            f"{codec} group of {group} elements: it must be a multiple of 8; use {codec}:64"
        )


def group_count(dim: int, group: int) -> int:
    """The number of groups in a token of width `dim`; the last may be shorter."""
    return -(-dim // group)


def grouped(x: Tensor, group: int) -> Tensor:
    """x (..., D) as (..., groups, group), in float32 or float64. A short last group is padded with
    its own first element, which changes neither its minimum nor its maximum."""
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
    """A scale or zero as float16, clamped to its range; a non-finite input becomes NaN, so that it
    stays visible."""
    finite = x.where(x.isfinite(), torch.nan)
    return finite.clamp(-_MOST_HALF, _MOST_HALF).to(torch.float16)


def divided(x: Tensor, scale: Tensor) -> Tensor:
    """x / scale, and 0 where the scale is 0 or NaN."""
    return torch.nan_to_num(x / scale.to(x.dtype), nan=0.0, posinf=0.0, neginf=0.0)


def packed(codes: Tensor, bits: int) -> Tensor:
    """Codes uint8 (..., D) below 2 ** bits -> (..., D * bits / 8), the first in the low bits."""
    parts = codes.reshape(*codes.shape[:-1], -1, 8 // bits)
    out = parts[..., 0]
    for i in range(1, 8 // bits):
        out = out | (parts[..., i] << (bits * i))
    return out


def unpacked(planes: Tensor, bits: int) -> Tensor:
    """The inverse of `packed`."""
    parts = [(planes >> shift) & (2**bits - 1) for shift in range(0, 8, bits)]
    return torch.stack(parts, dim=-1).flatten(-2)


@dataclass(frozen=True)
class Grouped(Codec):
    """Codes of 8 or 4 bits with scales per group. On the CPU the native library encodes a tensor in
    one call; its codes may differ by one from those of tensor operations if x lies halfway between
    two codes.
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


ENCODING = Struct("=28q")
"""KvEncoding of native/abi.h."""

_BITS = {PLAIN.packing: 0, "int8": 8, "int4": 4}
_ABSENT = (0, 0, 0, 0)


def encoding(x: Tensor, planes: Planes, prefix: str, layout: KernelLayout) -> tuple[int, ...]:
    """The fields of a KvEncoding that writes tokens x (B, H, n, D) to the first n slots of planes
    whose names begin with `prefix`."""
    scale, zero = planes.get(prefix + "_scale"), planes.get(prefix + "_zero")
    return (
        *_plane(x),
        TYPES[x.dtype],
        *_plane(planes[prefix]),
        0,
        *(_ABSENT if scale is None else _plane(scale)),
        0,
        *(_ABSENT if zero is None else _plane(zero)),
        0,
        *x.shape,
        _BITS[layout.packing],
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
