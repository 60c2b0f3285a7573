"""Codecs, which encode keys and values. One file each; `base.Codec` is the contract."""

from kvkeep.codec.base import Codec, caution, left_plain, whole
from kvkeep.codec.fp8 import Fp8
from kvkeep.codec.int4 import Int4
from kvkeep.codec.int8 import Int8
from kvkeep.codec.kivi import Kivi
from kvkeep.codec.plain import Plain
from kvkeep.codec.straight import StraightThrough

CODECS: dict[str, type[Codec]] = {c.name: c for c in (Plain, Int8, Int4, Fp8, Kivi)}
"""Name in a spec -> class."""

__all__ = [
    "CODECS",
    "Codec",
    "Fp8",
    "Int4",
    "Int8",
    "Kivi",
    "Plain",
    "StraightThrough",
    "caution",
    "left_plain",
    "whole",
]
