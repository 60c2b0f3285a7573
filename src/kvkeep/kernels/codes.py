"""Shared by the kernels: decoding of codes, and visibility."""

from __future__ import annotations

import triton
import triton.language as tl

from kvkeep.packing import PACKINGS

INTERPRETED: bool = triton.knobs.runtime.interpret
"""Whether Triton's interpreter runs these kernels on the CPU (TRITON_INTERPRET=1)."""

PLAIN, INT8, INT4, FP8, INT2 = (
    PACKINGS[x].number for x in ("plain", "int8", "int4", "fp8", "int2")
)
"""The encoding of a plane, as constants for kernels."""

_INTERPRETED, _TRANSLATED = tl.constexpr(INTERPRETED), tl.constexpr(not INTERPRETED)
_PLAIN_CODE, _INT8_CODE, _FP8_CODE = tl.constexpr(PLAIN), tl.constexpr(INT8), tl.constexpr(FP8)
_INT2_CODE = tl.constexpr(INT2)
_FP8_BIAS = tl.constexpr(2.0**120)  # from the exponent bias of E4M3 to that of float32


@triton.jit
def product(a, b, TYPE: tl.constexpr):
    """a @ b in float32, with operands cast to TYPE."""
    if _INTERPRETED:  # the interpreter's dot reads bfloat16 as integers
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    return tl.dot(a, b, input_precision="ieee")


# PTX that decodes one code of each of two 16-bit words. A shift also moves bits from one word into
# the other; the mask removes them.

_INT8_BF16 = """{{ .reg .b32 x, a, b;
xor.b32 x, $1, 0x80808080;
prmt.b32 a, x, 0x4B000000, 0x754{low};
prmt.b32 b, x, 0x4B000000, 0x754{high};
sub.f32 a, a, 0f4B000080;
sub.f32 b, b, 0f4B000080;
cvt.rn.bf16x2.f32 $0, b, a; }}"""  # codes in the low mantissa bits of 2**23, then subtracted

_INT8_FP16 = """{{ .reg .b32 x, c;
mov.b32 c, 0x64806480;
shr.b32 x, $1, {down};
lop3.b32 x, x, 0x00FF00FF, 0x64806480, 0x6A;
sub.f16x2 $0, x, c; }}"""  # codes in the low mantissa bits of 1024, then subtracted

_FP8_BF16 = """{{ .reg .b32 x, y, c, z;
mov.b32 c, 0x7B807B80;
mov.b32 z, 0x80008000;
{shift}.b32 x, $1, 4;
shl.b32 y, $1, {up};
and.b32 x, x, 0x07F007F0;
lop3.b32 x, y, 0x80008000, x, 0xEA;
fma.rn.bf16x2 $0, x, c, z; }}"""  # multiplied by 2**120, to correct the exponent bias

_FP8_FP16 = """{{ .reg .b32 x, y, c;
mov.b32 c, 0x5C005C00;
{shift}.b32 x, $1, {by};
shl.b32 y, $1, {up};
and.b32 x, x, 0x3F803F80;
lop3.b32 x, y, 0x80008000, x, 0xEA;
mul.f16x2 $0, x, c; }}"""  # multiplied by 2**8, to correct the exponent bias

_INT4 = """{{ .reg .b32 x;
{shift}.b32 x, $1, {by};
lop3.b32 $0, x, {mask}, {sixteen}, 0xEA; }}"""  # codes in the mantissa bits of 16


def _int4(part: int, lowest: int, mask: str, sixteen: str) -> str:
    by = 4 * part - lowest
    shift = "shr" if by > 0 else "shl"
    return _INT4.format(shift=shift, by=abs(by), mask=mask, sixteen=sixteen)


PTX = {
    (INT8, "bf16"): [_INT8_BF16.format(low=p, high=p + 2) for p in range(2)],
    (INT8, "fp16"): [_INT8_FP16.format(down=8 * p) for p in range(2)],
    (FP8, "bf16"): [_FP8_BF16.format(shift=("shl", "shr")[p], up=8 - 8 * p) for p in range(2)],
    (FP8, "fp16"): [
        _FP8_FP16.format(shift=("shl", "shr")[p], by=(7, 1)[p], up=8 - 8 * p) for p in range(2)
    ],
    (INT4, "bf16"): [_int4(p, 3, "0x00780078", "0x41804180") for p in range(4)],
    (INT4, "fp16"): [_int4(p, 6, "0x03C003C0", "0x4C004C00") for p in range(4)],
}
"""(code, type of the result) -> the instructions for each part of a word."""


_WRITTEN = tl.constexpr(
    repr(sorted(PTX.items()))
)  # part of the cache key of compiled kernels; see `numbers`


@triton.constexpr_function
def _ptx(code, part, wanted):  # type: ignore[no-untyped-def]
    return PTX[code, wanted][part]


@triton.jit
def numbers(words, CODE: tl.constexpr, PART: tl.constexpr, TYPE: tl.constexpr):
    """Unscaled numbers of TYPE: the PART-th code of each word, counted from the low bits.

    Codes are converted by placing their bits in a float's bits, which takes fewer instructions
    than a conversion. Numbers of 4-bit codes are too large by 16; 2-bit codes are relative to their
    middle.
    """
    if CODE == _PLAIN_CODE:
        return words.to(TYPE)
    if _TRANSLATED:
        tl.static_assert(_WRITTEN != "")  # so that changed instructions compile a new kernel
        if words.dtype == tl.int16:
            if TYPE == tl.bfloat16:
                return tl.inline_asm_elementwise(
                    _ptx(CODE, PART, "bf16"), "=r,r", [words], dtype=tl.bfloat16, is_pure=True,
                    pack=2,
                )  # fmt: skip
            if TYPE == tl.float16:
                return tl.inline_asm_elementwise(
                    _ptx(CODE, PART, "fp16"), "=r,r", [words], dtype=tl.float16, is_pure=True,
                    pack=2,
                )  # fmt: skip
    bits = words.to(tl.int32)
    if CODE == _INT8_CODE:
        bits = ((bits >> (8 * PART)) & 0xFF) ^ 0x4B000080
        return (bits.to(tl.float32, bitcast=True) - 8388736.0).to(TYPE)
    if CODE == _FP8_CODE:
        bits = bits >> (8 * PART)
        bits = ((bits & 0x80) << 24) | ((bits & 0x7F) << 20)
        return (bits.to(tl.float32, bitcast=True) * _FP8_BIAS).to(TYPE)
    if CODE == _INT2_CODE:
        bits = (((bits >> (2 * PART)) & 3) << 21) | 0x40800000  # the mantissa of 4
        return (bits.to(tl.float32, bitcast=True) - 5.5).to(TYPE)
    return (((bits >> (4 * PART)) & 15).to(tl.float32) + 16.0).to(TYPE)


@triton.jit
def within(query, slot, size, first, keep_from, keep_to):
    """See `kvkeep.planes.Reach.allows`."""
    return (query - slot < size) | (slot < first) | ((slot >= keep_from) & (slot < keep_to))


@triton.jit
def rounded(x):
    """A float32 of magnitude below 2**22, rounded to the nearest integer, ties to even."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def half_precision(x):
    """A scale as float16, clamped to its range; a non-finite scale becomes NaN, to stay visible."""
    x = tl.where(tl.abs(x) < float("inf"), x, float("nan"))
    return tl.where(tl.abs(x) > 65504.0, tl.where(x > 0, 65504.0, -65504.0), x).to(tl.float16)
