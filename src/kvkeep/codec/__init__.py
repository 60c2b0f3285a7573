"""How a slot is encoded. One file each; `base.Codec` is the contract."""

from kvkeep.codec.base import Codec
from kvkeep.codec.int4 import Int4
from kvkeep.codec.int8 import Int8
from kvkeep.codec.plain import Plain

CODECS: dict[str, type[Codec]] = {c.name: c for c in (Plain, Int8, Int4)}
"""Name in a spec -> class."""

__all__ = ["CODECS", "Codec", "Int4", "Int8", "Plain"]
