"""How a codec's codes lie in memory, for kernels that read and write them without decoding."""

from __future__ import annotations

from typing import NamedTuple

CODES = {"plain": 0, "int8": 3, "int4": 4, "fp8": 5}
"""Packing -> the number that kernels know it by. `plain` is floats of any type, `int8` signed codes
of a byte, `int4` two codes in a byte with the first in the low bits, `fp8` the bits of E4M3.

The Triton kernels take these numbers as constants (`kernels/codes.py`); the native library takes
those of `int8` and `int4` as a KvType (`native/abi.h`)."""


class KernelLayout(NamedTuple):
    """What a kernel must know of an encoded tensor beside the planes themselves."""

    packing: str
    """A name in `CODES`. A kernel that does not know it has the planes decoded first."""

    group: int = 0
    """How many neighbouring elements of a token share a scale; 0: there are no scales."""

    hadamard: bool = False
    """Whether tokens are rotated by the Hadamard matrix before they are encoded; queries on encoded
    keys need the same rotation (`Codec.rotate`)."""


PLAIN = KernelLayout("plain")
"""The layout of keys and values that are stored as floats."""
