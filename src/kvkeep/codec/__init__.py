"""Codecs, which encode keys and values. One file each; `base.Codec` is the contract.

To add a codec, add a line to `PARTS`, and an import for type checkers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvkeep.registry import Part, exports

if TYPE_CHECKING:
    from kvkeep.codec.base import Codec as Codec
    from kvkeep.codec.base import encoded_count as encoded_count
    from kvkeep.codec.base import keeps_plain as keeps_plain
    from kvkeep.codec.base import plain_count as plain_count
    from kvkeep.codec.base import warn_about_keys as warn_about_keys
    from kvkeep.codec.fp8 import Fp8 as Fp8
    from kvkeep.codec.int8 import Int8 as Int8
    from kvkeep.codec.ints import Int2 as Int2
    from kvkeep.codec.ints import Int3 as Int3
    from kvkeep.codec.ints import Int4 as Int4
    from kvkeep.codec.ints import Int5 as Int5
    from kvkeep.codec.ints import Int6 as Int6
    from kvkeep.codec.kivi import Kivi as Kivi
    from kvkeep.codec.plain import Plain as Plain
    from kvkeep.codec.straight import StraightThrough as StraightThrough
    from kvkeep.codec.within_keys import WithinKeys as WithinKeys

PARTS = {
    "plain": Part("Plain", "plain", "plain"),
    "int8": Part("Int8", "int8", "int8", error=0.02),
    "int6": Part("Int6", "int6", "int6", error=0.05, module="ints"),
    "int5": Part("Int5", "int5", "int5", error=0.1, module="ints"),
    "int4": Part("Int4", "int4", "int4", error=0.2, module="ints"),
    "int3": Part("Int3", "int3", "int3", error=0.4, module="ints"),
    "int2": Part("Int2", "int2", "int2", error=0.8, module="ints"),
    "fp8": Part("Fp8", "fp8", "fp8", error=0.05),
    "kivi": Part("Kivi", "kivi", "kivi:4,together=4,recent=4,sinks=2", error=0.25),
}
"""Every codec of kvkeep."""

_OTHERS = {"base": ["Codec"]}
_INTERNAL = {
    "base": ["encoded_count", "keeps_plain", "plain_count", "warn_about_keys"],
    "straight": ["StraightThrough"],
    "within_keys": ["WithinKeys"],
}
_RENAMED = {
    "whole": "kvkeep.codec.encoded_count",
    "left_plain": "kvkeep.codec.plain_count",
    "caution": "kvkeep.codec.warn_about_keys",
}

CODECS: dict[str, type[Codec]]
"""Name in a spec -> class."""

__getattr__, __all__ = exports(globals(), "CODECS", PARTS, _OTHERS, _RENAMED, internal=_INTERNAL)
