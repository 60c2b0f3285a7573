"""The memory layouts of encoded keys and values: codecs declare them, kernels read them."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

CODES = {"plain": 0, "int8": 3, "int4": 4, "fp8": 5, "int2": 6}
"""Packing -> its number in kernels. `plain`: floats of any type; `int8`: signed 8-bit codes; `int4`
and `int2`: two and four codes per byte, the first in the low bits; `fp8`: E4M3 bits.

The Triton kernels take these numbers as constants (`kernels/codes.py`); the native library takes
the numbers of `int8`, `int4` and `int2` as a KvType (`native/abi.h`)."""

NATIVE = CODES.keys() - {"fp8"}
"""The packings that the native library reads."""

_IN_A_BYTE = {"int4": 2, "int2": 4}


class KernelLayout(NamedTuple):
    """The layout of an encoded tensor: the information that a kernel needs besides the planes.

    `int4` codes mean code * scale + zero if there is a plane of zero points, otherwise (code - 8) *
    scale; `int2` codes always have zero points.
    """

    packing: str
    """A name in `CODES`. Backends that cannot read it decode the planes first."""

    group: int = 0
    """Number of consecutive elements of a token that share a scale; 0: no scales."""

    hadamard: bool = False
    """Whether tokens are rotated by the Hadamard matrix before encoding; queries on encoded keys
    need the same rotation (`Codec.rotate`)."""

    block: int = 1
    """If more than 1, scales are by channel: each element has its own scale, which this many
    consecutive tokens share, and `group` is 1."""

    def width(self, plane: Tensor) -> int:
        """The width D of the tokens in a plane of codes or floats."""
        return plane.shape[-1] * _IN_A_BYTE.get(self.packing, 1)


PLAIN = KernelLayout("plain")
"""The layout of keys and values stored as floats."""
