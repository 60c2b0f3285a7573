"""The memory layouts of encoded keys and values: codecs declare them, kernels read them."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Packing(NamedTuple):
    """How the codes of a token lie in memory.

    Codes of 2 and 4 bits fill bytes, the first in the low bits. The bits of codes of 3, 5 and 6 lie
    in two planes, one behind the other, so that a kernel spreads them to `wide` bits by one shift
    and one mask: the codes, packed at `wide` bits, are divided into equal parts, of which each has
    its own bits of every byte of the plane, the first part the lowest.
    """

    number: int
    """Its number in kernels: a constant of the Triton kernels (`kernels/codes.py`), a KvType of the
    native library (`native/abi.h`)."""

    bits: int = 0
    """Bits of a code; 0: floats of any type."""

    low: int = 0
    """The lower bits, which lie in the first of two planes; 0: all bits lie together."""

    wide: int = 0
    """The width to which kernels spread codes in two planes."""

    native: bool = True
    """Whether the native library reads and writes it."""

    appended: bool = True
    """Whether the Triton kernel that appends tokens writes it; else tensor operations do."""

    @property
    def planes(self) -> tuple[int, ...]:
        """The bits of a code in each plane."""
        return (self.low, self.bits - self.low) if self.low else (self.bits,)

    @property
    def together(self) -> int:
        """The number of elements of which the width must be a multiple."""
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
"""The number of scales of 8 bits in the native library."""


class KernelLayout(NamedTuple):
    """The layout of an encoded tensor: the information that a kernel needs besides the planes.

    Unsigned codes of b bits mean code * scale + zero if there is a plane of zero points, otherwise
    (code - 2 ** (b - 1)) * scale.
    """

    packing: str
    """A name in `PACKINGS`. Backends that cannot read it decode the planes first."""

    group: int = 0
    """Number of consecutive elements of a token that share a scale; 0: no scales."""

    hadamard: bool = False
    """Whether tokens are rotated by the Hadamard matrix before encoding; queries on encoded keys,
    and sums of encoded values, need the same rotation (`Codec.rotate`)."""

    block: int = 1
    """If more than 1, scales are by channel: each element has its own scale, which this many
    consecutive tokens share, and `group` is 1."""

    scale: int = 16
    """Bits of a scale: a float16 or, without scales by channel, its higher byte, which is E5M2."""

    def width(self, plane: Tensor) -> int:
        """The width D of the tokens in a plane of codes or floats."""
        return plane.shape[-1] * 8 // (PACKINGS[self.packing].bits or 8)


PLAIN = KernelLayout("plain")
"""The layout of keys and values stored as floats."""
