"""The memory layouts of encoded keys and values: codecs declare them, kernels read them."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Packing(NamedTuple):
    """The memory layout of a token's codes.

    Codes of 2 and 4 bits are packed into bytes, the first code in the lowest bits.

    Codes of 3, 5 and 6 bits are split into two planes, one behind the other: their `low` lower
    bits, then their remaining bits. To pack a plane with b bits per code, all codes are first
    packed at `wide` bits, and these bytes are divided into wide / b equal parts; part i moves to
    bit i * b of every code. So a kernel restores `wide` bits per code with one shift and one mask.
    """

    number: int
    """The packing's number in kernels: a constant of the Triton kernels (`kernels/codes.py`), a
    KvType of the native library (`native/abi.h`)."""

    bits: int = 0
    """Bits of a code; 0: floats of any type."""

    low: int = 0
    """Number of lower bits, which are stored in the first of two planes; 0: there is one plane."""

    wide: int = 0
    """Bits per code after kernels have merged the two planes."""

    native: bool = True
    """Whether the native library reads and writes this packing."""

    appended: bool = True
    """Whether Triton's kernel `append` writes this packing; if not, tensor operations do."""

    @property
    def planes(self) -> tuple[int, ...]:
        """The bits of a code in each plane."""
        return (self.low, self.bits - self.low) if self.low else (self.bits,)

    @property
    def together(self) -> int:
        """The width of a token must be a multiple of this number."""
        return max(8 // bits for bits in self.planes) if self.bits else 1


PACKINGS = {
    "plain": Packing(0),
    "int8": Packing(3, 8),
    "int6": Packing(7, 6, low=4, wide=8, appended=False),
    "int5": Packing(8, 5, low=4, wide=8, appended=False),
    "int4": Packing(4, 4),
    "int3": Packing(9, 3, low=2, wide=4, appended=False),
    "int2": Packing(6, 2, appended=False),
    "fp8": Packing(5, 8, native=False),
}
"""Every packing that a kernel reads, by name. Codes of `int8` are signed, of `fp8` E4M3 bits;
the other codes are unsigned."""


HIGH_HALF = 10
"""KV_HIGH_HALF of native/abi.h: the number of 8-bit scales."""


class KernelLayout(NamedTuple):
    """The layout of an encoded tensor: the information that a kernel needs besides the planes.

    An unsigned code of b bits decodes to code * scale + zero if there is a plane of zero points,
    otherwise to (code - 2 ** (b - 1)) * scale.
    """

    packing: str
    """A name in `PACKINGS`. Backends that cannot read this packing decode the planes first."""

    group: int = 0
    """Number of consecutive elements of a token that share a scale; 0: no scales."""

    hadamard: bool = False
    """Whether tokens are rotated by the Hadamard matrix before encoding; queries on encoded keys,
    and sums of encoded values, need the same rotation (`Codec.rotate`)."""

    block: int = 1
    """More than 1: scales are per channel, `group` is 1, and `block` consecutive tokens share the
    scale of each element."""

    scale: int = 16
    """Bits of a scale: 16 (float16), or 8 (its higher byte, E5M2; not per channel)."""

    def width(self, plane: Tensor) -> int:
        """The width D of the tokens in a plane of codes or floats."""
        return plane.shape[-1] * 8 // (PACKINGS[self.packing].bits or 8)


PLAIN = KernelLayout("plain")
"""The layout of keys and values stored as floats."""
