"""6, 5, 4, 3 or 2 bits per element, with one scale per token and group of elements."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
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
    packed_as,
    rounded_half,
    rounded_scale,
    scale_values,
    ungrouped,
    unpacked_as,
)
from kvkeep.errors import ShapeError, SpecError
from kvkeep.packing import PACKINGS, KernelLayout, Packing
from kvkeep.planes import Planes, PlaneSpec

_MOST_AFFINE = 4  # most bits of codes with zero points
_MOST_SMALL = 4  # most bits of codes that may have scales of 8 bits
_ROTATED_VALUES = 3  # most bits for which rotating values reduces the loss
_MOST_FITTED = 3  # most bits of codes whose scales are fitted
_FACTORS = (1.0, 1.1, 0.9, 0.8, 0.7)  # of the scale for the largest element; native/encode.cpp too


@dataclass(frozen=True)
class Ints(Grouped):
    """x = (code - 2**(bits - 1)) * scale, or code * scale + zero when `affine`; codes
    0..2**bits - 1.

    Planes: "" uint8 (D * bits / 8,), packed as `kvkeep.packing` says; "_scale" (groups,), float16
    or, if `scale` is 8, uint8, the high byte of a float16; "_zero" float16 (groups,) when affine.
    The symmetric scale has the sign that maps the element of largest magnitude to code 0, as in
    llama.cpp's Q4_0. In 3 and 2 bits it is this scale times the factor, from 0.7 to 1.1, that gives
    the least squared error; llama.cpp's Q3_K searches its scales too. Keys, and values in 3 and 2
    bits, are rotated by a Hadamard matrix first, unless `hadamard` is False.

    The scale that is stored with symmetric codes is then the one at which the product of a group
    and its decoded form is the group's squared length (EDEN, arXiv 2108.08842). Codes with the
    least squared error decode to keys and values that are too short on average (13 % in 2 bits,
    3 % in 3), which no sum over tokens averages out. With `scale` 8 most scales do not change,
    because their steps are larger.

    Before that, the mean key of the first `centre` tokens is subtracted from keys (0: no centre);
    see `kvkeep.attention.centre`. If a layer's storage grows, the first `sinks` and the newest
    `recent` tokens stay plain, so a chunk's queries read the chunk's own tokens unencoded. A policy
    with a budget evicts none of the plain tokens: they are at most half of its budget. In a sliding
    window plain tokens are less than half, and the first tokens are plain only if the policy keeps
    them (`window:1024,sinks=4`). Compressing a text (`kvzip`) encodes the plain tokens before the
    newest one that some head frees.
    """

    group: int = 32
    affine: bool = False
    hadamard: bool = True
    scale: int = 16
    centre: int = 256
    recent: int = 64
    sinks: int = 4

    def __post_init__(self) -> None:
        check_group(self.name, self.group)
        if min(self.centre, self.recent, self.sinks) < 0:
            raise SpecError(
                f"{self.name} of centre={self.centre}, recent={self.recent}, sinks={self.sinks}: "
                f"each must be at least 0; use {self.name}"
            )
        if self.scale not in (8, 16) or (self.scale == 8 and self.bits > _MOST_SMALL):
            raise SpecError(
                f"{self.name} scale={self.scale}: a scale has 16 bits, or 8 bits for codes of at "
                f"most {_MOST_SMALL} bits; use {self.name}"
            )
        if self.affine and self.bits > _MOST_AFFINE:
            raise SpecError(
                f"{self.name} affine=1: codes of {self.bits} bits have no zero points; use "
                f"{self.name}, or int{_MOST_AFFINE}:affine=1"
            )

    @property
    def key_warning(self) -> str | None:
        """See `Codec.key_warning`. The Hadamard rotation spreads the error of a large channel over
        all channels but does not reduce it."""
        if self.bits > _MOST_AFFINE or self.centre:
            return None
        return (
            f"codec {self.name} without a centre loses too much precision of keys in models with a "
            "few large key channels (Qwen2.5: a KL of 1.8 nats in 4 bits); use +int8/int4 or leave "
            "out centre=0"
        )

    @cached_property
    def packing(self) -> Packing:
        """The memory layout of the codes."""
        return PACKINGS[self.name]

    def planes(self, dim: int, dtype: torch.dtype) -> dict[str, PlaneSpec]:
        if dim % self.packing.together:
            raise ShapeError(
                f"{self.name} packs {self.packing.together} elements together, but the width is "
                f"{dim}; use int8"
            )
        groups = (group_count(dim, self.group),)
        kind = torch.uint8 if self.scale == 8 else torch.float16
        codes = PlaneSpec((dim * self.bits // 8,), torch.uint8)
        planes = {"": codes, "_scale": PlaneSpec(groups, kind)}
        return planes | ({"_zero": PlaneSpec(groups, torch.float16)} if self.affine else {})

    @cached_property
    def layout(self) -> KernelLayout:
        return KernelLayout(self.name, self.group, self.hadamard, scale=self.scale)

    def encode_in_steps(self, x: Tensor) -> Planes:
        groups = grouped(self.rotate(x), self.group)
        low, high = groups.aminmax(dim=-1)
        most, middle = 2**self.bits - 1, 2 ** (self.bits - 1)
        if self.affine:
            zero = rounded_half(low)
            scale = rounded_scale((high - zero.to(high.dtype)) / most, self.scale)
            step = scale_values(scale, high.dtype)[..., None]
            codes = divided(groups - zero.to(high.dtype)[..., None], step)
            codes = codes.round_().clamp_(0, most)
            more = {"_zero": zero}
        else:
            largest = torch.where(high > -low, high, low)
            codes, scale = self._fitted(groups, largest / -middle, x.shape[-1])
            scale = self._unbiased(groups, codes - middle, scale, x.shape[-1])
            more = {}
        codes = ungrouped(codes, x.shape[-1]).to(torch.uint8)
        return {"": packed_as(codes, self.packing), "_scale": scale} | more

    def _fitted(self, groups: Tensor, largest: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """Codes and scales of groups without zero points, given the scales (..., groups) at which
        the largest elements have code 0. `width`: of a token, without the padding of its last
        group."""
        most, middle = 2**self.bits - 1, 2 ** (self.bits - 1)
        found: list[Tensor] = []  # codes, scales, squared errors
        for factor in _FACTORS if self.bits <= _MOST_FITTED else _FACTORS[:1]:
            scale = rounded_scale(largest * factor, self.scale)
            step = scale_values(scale, groups.dtype)[..., None]
            codes = (divided(groups, step) + middle).round_().clamp_(0, most)
            squares = (groups - (codes - middle) * step).square_()
            error = _sums(squares, width)[..., None]
            tried = [codes, scale[..., None], error]
            found = tried if not found else _where(error < found[2], tried, found)
        return found[0], found[1][..., 0]

    def _unbiased(self, groups: Tensor, codes: Tensor, scale: Tensor, width: int) -> Tensor:
        """The scales (..., groups) at which the product of each group and its decoded form is the
        group's squared length; `scale` if all codes are 0. `codes`: counted from their middle."""
        step = scale_values(scale, groups.dtype)
        x = divided(groups, step[..., None])
        found = step * (_sums(x * x, width) / _sums(x * codes, width))
        return torch.where(found.isfinite(), rounded_scale(found, self.scale), scale)

    def decode(self, planes: Planes, dtype: torch.dtype) -> Tensor:
        compute = torch.promote_types(dtype, torch.float32)
        codes = unpacked_as(planes[""], self.packing).to(compute)
        scale = scale_values(planes["_scale"], compute)[..., None]
        width = codes.shape[-1]
        if self.affine:
            x = grouped(codes, self.group) * scale + planes["_zero"].to(compute)[..., None]
        else:
            x = grouped(codes - 2 ** (self.bits - 1), self.group) * scale
        return self.rotate(ungrouped(x, width)).to(dtype)

    @property
    def tail(self) -> int:
        return self.recent

    def with_tail(self, recent: int, sinks: int) -> Codec:
        return replace(self, recent=min(self.recent, recent), sinks=min(self.sinks, sinks))

    def for_values(self) -> Codec:
        return replace(self, hadamard=self.hadamard and self.bits <= _ROTATED_VALUES, centre=0)

    def for_latents(self) -> Codec:
        return replace(self, hadamard=False, centre=0)

    def width(self, planes: Planes) -> int:
        return planes[""].shape[-1] * 8 // self.bits


def _sums(x: Tensor, width: int) -> Tensor:
    """The sums of groups x (..., groups, group), without the padding after `width` elements. May
    change x."""
    flat = x.flatten(-2)
    flat[..., width:] = 0
    return flat.view(x.shape).sum(dim=-1)


def _where(less: Tensor, tried: list[Tensor], found: list[Tensor]) -> list[Tensor]:
    return [torch.where(less, *both) for both in zip(tried, found, strict=True)]


@final
@dataclass(frozen=True)
class Int6(Ints):
    """6 bits; see `Ints`."""

    name: ClassVar[str] = "int6"
    bits: ClassVar[int] = 6


@final
@dataclass(frozen=True)
class Int5(Ints):
    """5 bits; see `Ints`."""

    name: ClassVar[str] = "int5"
    bits: ClassVar[int] = 5


@final
@dataclass(frozen=True)
class Int4(Ints):
    """4 bits; see `Ints`."""

    name: ClassVar[str] = "int4"
    bits: ClassVar[int] = 4


@final
@dataclass(frozen=True)
class Int3(Ints):
    """3 bits; see `Ints`."""

    name: ClassVar[str] = "int3"
    bits: ClassVar[int] = 3


@final
@dataclass(frozen=True)
class Int2(Ints):
    """2 bits; see `Ints`."""

    name: ClassVar[str] = "int2"
    bits: ClassVar[int] = 2
