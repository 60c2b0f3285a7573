"""The memory layouts of encoded keys and values, which codecs declare and kernels read."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

CODES = {"plain": 0, "int8": 3, "int4": 4, "fp8": 5, "int2": 6}
"""Packing -> its number in kernels. `plain` is floats of any type, `int8` signed codes of a byte,
`int4` and `int2` two and four codes in a byte with the first in the low bits, `fp8` the bits of
E4M3.

The Triton kernels take these numbers as constants (`kernels/codes.py`); the native library takes
those of `int8`, `int4` and `int2` as a KvType (`native/abi.h`)."""

NATIVE = CODES.keys() - {"fp8"}
"""The packings that the native library reads."""

_IN_A_BYTE = {"int4": 2, "int2": 4}


class KernelLayout(NamedTuple):
    """The layout of an encoded tensor: what a kernel needs in addition to the planes.

    `int4` codes mean code * scale + zero if there is a plane of zeros, otherwise (code - 8) *
    scale; `int2` codes always have zeros.
    """

    packing: str
    """A name in `CODES`. Backends whose kernels do not read it decode the planes first."""

    group: int = 0
    """The number of consecutive elements of a token that share a scale; 0: there are no scales."""

    hadamard: bool = False
    """Whether tokens are rotated by the Hadamard matrix before they are encoded; queries on encoded
    keys need the same rotation (`Codec.rotate`)."""

    block: int = 1
    """More than 1: scales are by channel. Each element has a scale of its own, which this many
    consecutive tokens share, and `group` is 1."""

    def width(self, plane: Tensor) -> int:
        """D of the tokens in a plane of codes or floats."""
        return plane.shape[-1] * _IN_A_BYTE.get(self.packing, 1)


PLAIN = KernelLayout("plain")
"""The layout of keys and values that are stored as floats."""
