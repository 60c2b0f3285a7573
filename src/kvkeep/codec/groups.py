"""What codecs share: groups of elements with one scale in half precision, and packed bits."""

from __future__ import annotations

from struct import Struct

import torch
from torch import Tensor

from kvkeep.errors import SpecError
from kvkeep.library import LIBRARY, TYPES
from kvkeep.planes import Planes

_MOST_HALF = 65504.0  # the largest float16


def check_group(codec: str, group: int) -> None:
    """Raise SpecError for a group of no elements, or one that a kernel cannot take at a time."""
    if group < 8 or group % 8:
        raise SpecError(f"{codec} group of {group} elements: a multiple of 8, e.g. {codec}:64")


def group_count(dim: int, group: int) -> int:
    """Groups of a token of width `dim`; the last may be shorter."""
    return -(-dim // group)


def grouped(x: Tensor, group: int) -> Tensor:
    """x (..., D) in float32 (float64 stays) as (..., groups, group); a short last group is filled
    with its own first element, which changes no smallest and no largest one."""
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
    """A scale or zero as float16, within its range; what is not finite becomes NaN, to show."""
    finite = x.where(x.isfinite(), torch.nan)
    return finite.clamp(-_MOST_HALF, _MOST_HALF).to(torch.float16)


def divided(x: Tensor, scale: Tensor) -> Tensor:
    """x / scale, and 0 where the scale is 0 or not a number."""
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


_ENCODING = Struct("=15q")  # KvEncoding of native/abi.h


def encoded_in_one_call(
    x: Tensor, bits: int, group: int, *, hadamard: bool, affine: bool = False
) -> Planes | None:
    """What `encode` gives for codes of 8 or 4 bits, from compiled code; None where that cannot run.

    A code may differ by one from what tensor operations give, where x lies halfway between two.
    """
    if LIBRARY is None or not x.is_cpu or x.dtype not in TYPES or torch.compiler.is_compiling():
        return None
    if x.stride(3) != 1:
        x = x.contiguous()
    rows, heads, slots, width = x.shape
    front = (rows, heads, slots)
    codes = x.new_empty((*front, width * bits // 8), dtype=torch.int8 if bits == 8 else torch.uint8)
    scale = x.new_empty((*front, group_count(width, group)), dtype=torch.float16)
    planes = {"": codes, "_scale": scale}
    if affine:
        planes["_zero"] = torch.empty_like(scale)
    encoding = _ENCODING.pack(
        x.data_ptr(),
        codes.data_ptr(),
        scale.data_ptr(),
        planes["_zero"].data_ptr() if affine else 0,
        TYPES[x.dtype],
        *x.stride()[:3],
        rows,
        heads,
        slots,
        width,
        bits,
        group,
        hadamard,
    )
    if LIBRARY.kv_encode(encoding):
        raise MemoryError(f"no scratch memory to encode {slots} tokens")
    return planes
