"""Codecs: literal small tensors, what they promise of bytes and error, and bad input."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from support.pairwise import pairwise

from kvkeep import native_library
from kvkeep.codec import CODECS, Fp8, Int2, Int3, Int4, Int5, Int6, Int8, Kivi
from kvkeep.codec.groups import (
    packed,
    packed_as,
    rounded_scale,
    scale_values,
    unpacked,
    unpacked_as,
)
from kvkeep.codec.hadamard import hadamard
from kvkeep.errors import ShapeError, SpecError
from kvkeep.packing import PACKINGS
from kvkeep.testing import CODEC_ERRORS

# |x - x'| / |x| for normally distributed tokens.
ERROR = CODEC_ERRORS | {
    "int8": 0.01, "int6": 0.025, "int5": 0.05, "int4": 0.1, "int3": 0.2, "int2": 0.4, "fp8": 0.04,
    "kivi": 0.12,
}  # fmt: skip
"""Widths of 64 and more have smaller errors than small ones."""

EVERY = [
    *[CODECS[name]() for name in CODECS],
    *[CODECS[name]().for_values() for name in CODECS],
    Int8(16, hadamard=False),
    Int4(64),
    Int4(8, affine=True),
    Int3(16, scale=8),
    Kivi(together=4, group=16),
]


def numbers(*values):
    return torch.tensor(values, dtype=torch.float32).view(1, 1, 1, -1)


def steps(codec):
    return getattr(codec, "encode_in_steps", codec.encode)


@pytest.mark.parametrize("compiled", [True, False])
def test_int8_literal(compiled):
    codec = Int8(hadamard=False)
    x = numbers(127, -63.5, 2, 0, 1, 0, 0, -127)
    planes = codec.encode(x) if compiled else steps(codec)(x)
    assert planes[""].flatten().tolist() == [127, -64, 2, 0, 1, 0, 0, -127]  # ties to even
    assert planes["_scale"].flatten().tolist() == [1.0]


@pytest.mark.parametrize("compiled", [True, False])
def test_int4_literal(compiled):
    codec = Int4(8, hadamard=False)
    x = numbers(-8, 7, 0, 1, 2, 3, -3, 4)
    planes = codec.encode(x) if compiled else steps(codec)(x)
    assert planes["_scale"].item() == 1.0
    assert unpacked(planes[""], 4).flatten().tolist() == [0, 15, 8, 9, 10, 11, 5, 12]
    assert planes[""].flatten()[0].item() == 0xF0  # element 0 in the low half
    x = numbers(8, 1, 0, -4, 0, 0, 0, 0)  # the largest is on code 0 whatever its sign
    planes = codec.encode(x) if compiled else steps(codec)(x)
    assert planes["_scale"].item() == -1.0
    assert codec.decode(planes, torch.float32).equal(x)


@pytest.mark.parametrize("compiled", [True, False])
def test_affine_int4_literal(compiled):
    codec = Int4(8, affine=True, hadamard=False)
    x = numbers(10, 25, 11, 12, 13, 14, 20, 15)
    planes = codec.encode(x) if compiled else steps(codec)(x)
    assert (planes["_zero"].item(), planes["_scale"].item()) == (10.0, 1.0)
    assert codec.decode(planes, torch.float32).equal(x)


@pytest.mark.parametrize("compiled", [True, False])
def test_int3_literal(compiled):
    """As 4-bit codes these are the bytes 70 54 36 12 77 77 44 44. Two parts of them share the
    bytes of the lower two bits, four parts those of the highest bit."""
    codec = Int3(16, hadamard=False)
    x = numbers(-4, 3, 0, 1, 2, -1, -2, -3, 3, 3, 3, 3, 0, 0, 0, 0)
    planes = codec.encode(x) if compiled else steps(codec)(x)
    assert planes["_scale"].item() == 1.0
    assert planes[""].flatten().tolist() == [0xFC, 0xDC, 0x32, 0x12, 0xDE, 0xDD]
    assert codec.decode(planes, torch.float32).equal(x)


def test_kivi_literal():
    """A channel of keys has a scale over four tokens; values have one for each token and group."""
    keys = Kivi(2, together=4)
    x = torch.tensor([[0.0, 10], [1, 20], [2, 30], [3, 40]]).repeat(1, 4).view(1, 1, 4, 8)
    planes = keys.encode(x)
    assert planes[""].shape == (1, 1, 1, 4, 2)
    assert planes["_scale"].flatten()[:2].tolist() == [1.0, 10.0]
    assert planes["_zero"].flatten()[:2].tolist() == [0.0, 10.0]
    assert keys.decode(planes, torch.float32).equal(x)
    values = keys.for_values()
    planes = values.encode(x.transpose(2, 3).reshape(1, 1, 8, 4).repeat(1, 1, 1, 2))
    assert planes["_scale"].shape == (1, 1, 2, 4, 1)


def test_hadamard_spreads_and_returns():
    assert hadamard(numbers(2, 0, 0, 0)).flatten().tolist() == [1, 1, 1, 1]
    for width in (8, 80, 96):
        x = torch.randn(3, width)
        torch.testing.assert_close(hadamard(hadamard(x)), x)
        torch.testing.assert_close(hadamard(x).norm(dim=1), x.norm(dim=1))


@pytest.mark.parametrize(
    ("codec", "dtype", "width"),
    pairwise(EVERY, [torch.float32, torch.bfloat16, torch.float16], [64, 80, 128]),
    ids=str,
)
def test_planes_are_as_declared_and_the_error_as_expected(codec, dtype, width):
    x = torch.randn(2, 3, 64, width).to(dtype)
    planes = codec.encode(x)
    declared = codec.planes(width, dtype)
    assert planes.keys() == declared.keys()
    for name, spec in declared.items():
        assert planes[name].shape == (2, 3, 64 // codec.block, *spec.shape)
        assert planes[name].dtype == spec.dtype
    back = codec.decode(planes, torch.float32)
    assert codec.width(planes) == width
    error = (back - x.float()).norm() / x.float().norm()
    assert error <= ERROR[codec.name]
    assert codec.decode(planes, dtype).dtype == dtype
    assert codec.decode(planes, torch.float64).dtype == torch.float64


INTS = [Int8, Int6, Int5, Int4, Int3, Int2]


@pytest.mark.parametrize("kind", INTS)
def test_a_slot_takes_its_codes_and_scales(kind):
    codecs = [kind(), kind().for_values()]
    codecs += [kind(16, scale=8)] if kind.bits <= 4 else []
    for codec in codecs:
        planes = codec.encode(torch.randn(1, 1, 100, 128, dtype=torch.bfloat16))
        scales = 128 // codec.group * getattr(codec, "scale", 16)
        assert (
            sum(plane.nbytes for plane in planes.values()) == 100 * (128 * kind.bits + scales) / 8
        )


@pytest.mark.skipif(not native_library.available, reason=native_library.reason)
@pytest.mark.parametrize(
    "codec",
    [
        *[kind() for kind in INTS], Int8(16, hadamard=False), Int4(64), Int4(affine=True),
        Int2(affine=True), Int3(16, scale=8), Int4(scale=8),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_compiled_encoding_is_that_of_tensor_operations(codec, dtype):
    for width, strided in product((64, 80, 40), (False, True)):
        x = torch.randn(2, 3, 50, width).to(dtype)
        x = x.transpose(1, 2).contiguous().transpose(1, 2) if strided else x
        one, other = codec.encode(x), codec.encode_in_steps(x)
        for name in ("_scale", "_zero"):
            if name in other:
                torch.testing.assert_close(one[name], other[name], rtol=2e-3, atol=1e-6)
        packing = PACKINGS[codec.layout.packing]
        codes = [
            p[""].int() if codec.name == "int8" else unpacked_as(p[""], packing).int()
            for p in (one, other)
        ]
        apart = (codes[0] - codes[1]).abs()
        assert apart.max() <= 1
        assert (apart > 0).float().mean() < 2e-3  # halfway between two codes


def unfitted(groups, codec):
    """Groups decoded from a scale that gives the largest element an extreme code."""
    middle = 2 ** (codec.bits - 1)
    largest = groups.gather(-1, groups.abs().argmax(dim=-1, keepdim=True))
    scale = scale_values(rounded_scale(largest / -middle, codec.scale), torch.float32)
    return (groups / scale).round().clamp(-middle, middle - 1) * scale


def products(a, b):
    return (a * b).sum(dim=-1, keepdim=True)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("codec", [Int3(), Int2(), Int3(16, scale=8)], ids=str)
def test_scales_of_narrow_codes_reduce_the_error(codec, compiled):
    """That is, what differs from a multiple of the group: squared, one less the squared cosine."""
    x, codec = torch.randn(1, 1, 500, 64), replace(codec, hadamard=False)
    back = codec.decode(codec.encode(x) if compiled else steps(codec)(x), torch.float32)
    groups = x.view(-1, codec.group)
    fitted, other = (
        1 - (products(y, groups) ** 2 / products(y, y) / products(groups, groups)).mean()
        for y in (back.view_as(groups), unfitted(groups, codec))
    )
    assert fitted < 0.95 * other


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("codec", [Int2(), Int3(), Int4(), Int6(64)], ids=str)
def test_decoded_groups_are_as_long_along_the_group(codec, compiled):
    """Rounded to the nearest code alone, they are shorter: by 13 % in 2 bits. Also the last group,
    of 16 elements."""
    x, codec = 5 + torch.randn(2, 3, 50, 80), replace(codec, hadamard=False)
    back = codec.decode(codec.encode(x) if compiled else steps(codec)(x), torch.float32)
    for one, other in zip(x.split(codec.group, -1), back.split(codec.group, -1), strict=True):
        torch.testing.assert_close(products(one, other), products(one, one), rtol=1e-3, atol=0)


@pytest.mark.parametrize("codec", EVERY, ids=str)
def test_a_group_of_equal_elements(codec):
    for value in (0.0, 3.0, -1e-7):
        x = torch.full((1, 2, 64, 64), value)
        for encode in (codec.encode, steps(codec)):
            back = codec.decode(encode(x), torch.float32)
            assert back.isfinite().all()
            assert (back - x).abs().max() <= 0.05 * abs(value) + 1e-6


@pytest.mark.parametrize("codec", [c for c in EVERY if c.name != "plain"], ids=str)
def test_large_elements_stay_finite(codec):
    """Also where a scale would be beyond half precision."""
    x = 1e9 * torch.randn(1, 2, 64, 64)
    for encode in (codec.encode, steps(codec)):
        assert codec.decode(encode(x), torch.float32).isfinite().all()


@pytest.mark.parametrize("codec", [Int4(affine=True, hadamard=False), Kivi().for_values()], ids=str)
def test_codes_count_from_the_zero_as_it_is_stored(codec):
    """The smallest element is 1000.2, which is 1000 in half precision."""
    x = torch.linspace(1000.2, 1001.5, 32).repeat(32, 2)[None, None]
    for encode in (codec.encode, steps(codec)):
        back = codec.decode(encode(x), torch.float32)
        assert (back - x).abs().max() <= 0.51 * (1001.5 - 1000.0) / 15


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("codec", [c for c in EVERY if c.name != "plain"], ids=str)
def test_what_is_not_finite_shows_and_stays_in_its_token(codec, bad):
    x = torch.randn(1, 1, 64, 64)
    x[0, 0, 40, 5] = bad
    for encode in (codec.encode, steps(codec)):
        back = codec.decode(encode(x), torch.float32)
        assert not back[0, 0, 40].isfinite().all()
        near = torch.arange(64) // codec.block == 40 // codec.block
        assert back[0, 0, ~near].isfinite().all()


def test_bits_are_packed_without_loss():
    for bits in (2, 4):
        codes = torch.randint(0, 2**bits, (3, 16), dtype=torch.uint8)
        assert unpacked(packed(codes, bits), bits).equal(codes)
    for name in ("int6", "int5", "int4", "int3", "int2"):
        packing = PACKINGS[name]
        codes = torch.randint(0, 2**packing.bits, (3, 40), dtype=torch.uint8)
        whole = packed_as(codes, packing)
        assert whole.shape[-1] == 5 * packing.bits
        assert unpacked_as(whole, packing).equal(codes)


def test_wrong_options():
    for wrong in (lambda: Int8(0), lambda: Int4(12), lambda: Fp8(-8), lambda: Kivi(group=3)):
        with pytest.raises(SpecError, match="multiple of 8"):
            wrong()
    for wrong in (lambda: Int3(scale=4), lambda: Int6(scale=8)):
        with pytest.raises(SpecError, match="8 bits for codes of at most 4 bits; use int"):
            wrong()
    with pytest.raises(SpecError, match="use int5, or int4:affine=1"):
        Int5(affine=True)
    for wrong in (lambda: Kivi(3), lambda: Kivi(together=1), lambda: Kivi(recent=-1)):
        with pytest.raises(SpecError, match="use kivi:4"):
            wrong()


def test_widths_that_cannot_be_packed():
    with pytest.raises(ShapeError, match="width is 7"):
        Int4().encode(torch.randn(1, 1, 1, 7))
    with pytest.raises(ShapeError, match="int3 packs 8 elements together, but the width is 12"):
        Int3().encode(torch.randn(1, 1, 1, 12))
    with pytest.raises(ShapeError, match="width is 6"):
        Kivi(2, together=2).encode(torch.randn(1, 1, 2, 6))
