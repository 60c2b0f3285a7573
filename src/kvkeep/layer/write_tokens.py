"""Writes new tokens to their slots. On CUDA one kernel launch encodes and writes them, at a slot
index that may be a tensor."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvkeep.attention import triton
from kvkeep.attention.tiles import power_of_two
from kvkeep.codec import Codec
from kvkeep.packing import PACKINGS
from kvkeep.planes import POSITION, Planes, along_slots, joined

_MOST_WIDTH = 512
_DEVICES = ("cuda",)  # where the kernel is faster than tensor operations


def write(
    k: Tensor,
    v: Tensor,
    own: Planes,
    planes: Planes,
    key_codec: Codec,
    value_codec: Codec,
    cursor: Tensor | None = None,
) -> None:
    """Encode n new tokens and write them to their slots.

    Args:
        k, v: (B, H, n, Dk) and (B, H, n, Dv); any strides.
        own: the new tokens' planes other than keys and values, (B, H|1, n, ...), including
            positions.
        planes: changed in place. Without a `cursor`, the new tokens' slots, (B, H|1, n, ...); with
            a `cursor`, all slots, (B, H|1, S, ...).
        key_codec, value_codec: encode keys and values.
        cursor: slot index of a single token, int64 (B|1, H|1, 1).
    """
    if k.device.type in _DEVICES and able(k, v, key_codec, value_codec) and _side_by_side(planes):
        append(k, v, own[POSITION], planes, 0 if cursor is None else cursor, key_codec, value_codec)
        own = {name: plane for name, plane in own.items() if name != POSITION}
    elif cursor is None:
        key_codec.encode_into(k, planes, "k")
        value_codec.encode_into(v, planes, "v")
    else:
        keys, values = joined(key_codec.encode(k), "k"), joined(value_codec.encode(v), "v")
        own = {**own, **keys, **values}
    for name, new in own.items():
        if cursor is None:
            planes[name].copy_(new)
        else:
            plane = planes[name]
            index = along_slots(cursor if plane.shape[1] > 1 else cursor[:, :1], plane)
            plane.scatter_(2, index, new.expand(index.shape))


def able(k: Tensor, v: Tensor, key_codec: Codec, value_codec: Codec) -> bool:
    """Whether the Triton kernel can write these tokens."""
    there = k.is_cuda or triton.interpreted()
    codecs = key_codec, value_codec
    known = all(by_kernel(codec) for codec in codecs)
    floats = k.dtype != torch.float64 and v.dtype != torch.float64
    fits = max(k.shape[3], v.shape[3]) <= _MOST_WIDTH
    return there and known and floats and fits and not triton.reason()


def by_kernel(codec: Codec) -> bool:
    """Whether the Triton kernel can encode like this codec."""
    layout = triton.readable(codec)
    if layout is None or layout.block > 1 or layout.scale != 16:
        return False
    return codec.block == 1 and PACKINGS[layout.packing].appended


def append(
    k: Tensor,
    v: Tensor,
    position: Tensor,
    planes: Planes,
    cursor: int | Tensor,
    key_codec: Codec,
    value_codec: Codec,
) -> None:
    """Write n tokens and their positions with the Triton kernel; check `able` first.

    Args:
        k, v: (B, H, n, Dk) and (B, H, n, Dv); any strides.
        position: int32 (n,) or (B, n), or expanded over heads (B, 1|H, n).
        planes: (B, H|1, S, ...), changed in place.
        cursor: slot index of the first token: an int; or int64 (B|1, H|1, 1) on the device, if it
            differs between rows or heads or changes between replays of a graph.
        key_codec, value_codec: encode keys and values.
    """
    from kvkeep.kernels.append import append as kernel  # noqa: PLC0415 - Triton may be missing

    rows, heads, n, _ = k.shape
    k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (k, v))
    position = position.to(torch.int32)
    if position.dim() == 3:
        position = position[:, 0]
    position = position if position.stride(-1) == 1 else position.contiguous()
    by_row = position.dim() == 2 and position.shape[0] > 1
    at = cursor if isinstance(cursor, Tensor) else None
    key = _Plane.of(planes, "k", key_codec, k.shape[3])
    value = _Plane.of(planes, "v", value_codec, v.shape[3])
    place = planes[POSITION]
    with triton.on_device_of(k):
        kernel[(n, heads, rows)](
            k, v, position, at, *key.tensors, *value.tensors, place,
            key.rotation, value.rotation,
            *k.stride()[:3], *v.stride()[:3], position.stride(0) if by_row else 0,
            0 if at is None or at.shape[0] == 1 else at.stride(0),
            0 if at is None or at.shape[1] == 1 else at.stride(1),
            0 if isinstance(cursor, Tensor) else cursor,
            *key.strides, *value.strides, *place.stride(),
            **key.shape("K"), **value.shape("V"), PLACES=place.shape[1], num_warps=4,
        )  # fmt: skip


def _side_by_side(planes: Planes) -> bool:
    """Whether the elements of a slot are contiguous, and zero points have the strides of their
    scales, as the kernel requires."""
    return all(
        plane.stride(-1) == 1 or plane.shape[-1] == 1
        for name, plane in planes.items()
        if plane.dim() == 4
    ) and all(
        planes[name].stride() == planes[name.replace("_zero", "_scale")].stride()
        for name in planes
        if name.endswith("_zero")
    )


class _Plane(NamedTuple):
    """The kernel arguments for keys or values: their planes and encoding."""

    code: Tensor
    scale: Tensor
    zero: Tensor
    packing: int
    width: int
    group: int
    affine: bool
    rotation: Tensor | None
    """The matrix that tokens are multiplied by before encoding, float32 (D, D), or None."""

    @classmethod
    def of(cls, planes: Planes, name: str, codec: Codec, width: int) -> _Plane:
        codes = planes[name]
        scale, zero = planes.get(name + "_scale", codes), planes.get(name + "_zero")
        layout = codec.layout
        assert layout is not None  # `able` has checked it
        packing, group = PACKINGS[layout.packing].number, layout.group or width
        own = scale if zero is None else zero
        rotation = _rotation(codec, width, codes.device)
        return cls(codes, scale, own, packing, width, group, zero is not None, rotation)

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.code, self.scale, self.zero

    @property
    def strides(self) -> tuple[int, ...]:
        return *self.code.stride()[:3], *self.scale.stride()[:3]

    def shape(self, name: str) -> dict[str, Any]:
        groups = -(-self.width // self.group)
        return {
            f"{name}_CODE": self.packing, f"{name}_AFFINE": self.affine, f"D{name}": self.width,
            f"{name}_SIZE": self.group, f"{name}_GROUPS": groups,
            f"{name}_COUNT": power_of_two(groups),
            f"WIDE_{name}": max(2, power_of_two(self.width)),
            f"{name}_ROTATED": self.rotation is not None,
        }  # fmt: skip


@cache  # never freed, because CUDA graphs refer to its address
def _rotation(codec: Codec, width: int, device: torch.device) -> Tensor | None:
    """The rotation matrix of a codec, float32 (D, D); None if it does not rotate."""
    with torch.inference_mode(False):
        unrotated = torch.eye(width, device=device)
        rotated = codec.rotate(unrotated)
    return None if rotated is unrotated else rotated
