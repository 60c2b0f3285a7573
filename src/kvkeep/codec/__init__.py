"""How a slot is encoded. One file each; `base.Codec` is the contract."""

from kvkeep.codec.base import Codec
from kvkeep.codec.plain import Plain

CODECS: dict[str, type[Codec]] = {c.name: c for c in (Plain,)}
"""Name in a spec -> class."""

__all__ = ["CODECS", "Codec", "Plain"]
