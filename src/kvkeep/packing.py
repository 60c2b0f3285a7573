"""The memory layouts of encoded keys and values, which codecs declare and kernels read."""

from __future__ import annotations

from typing import NamedTuple

CODES = {"plain": 0, "int8": 3, "int4": 4, "fp8": 5}
"""Packing -> its number in kernels. `plain` is floats of any type, `int8` signed codes of a byte,
`int4` two codes in a byte with the first in the low bits, `fp8` the bits of E4M3.

The Triton kernels take these numbers as constants (`kernels/codes.py`); the native library takes
those of `int8` and `int4` as a KvType (`native/abi.h`)."""


class KernelLayout(NamedTuple):
    """The layout of an encoded tensor: what a kernel needs in addition to the planes."""

    packing: str
    """A name in `CODES`. Backends whose kernels do not read it decode the planes first."""

    group: int = 0
    """The number of consecutive elements of a token that share a scale; 0: there are no scales."""

    hadamard: bool = False
    """Whether tokens are rotated by the Hadamard matrix before they are encoded; queries on encoded
    keys need the same rotation (`Codec.rotate`)."""


PLAIN = KernelLayout("plain")
"""The layout of keys and values that are stored as floats."""
