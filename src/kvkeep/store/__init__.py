"""Stores: what was computed for one prompt, for others that begin like it."""

from kvkeep.store.backend import Backend, Block, Memory
from kvkeep.store.disk import Disk
from kvkeep.store.hit import Hit
from kvkeep.store.prefix import PrefixStore, StoreStats

__all__ = ["Backend", "Block", "Disk", "Hit", "Memory", "PrefixStore", "StoreStats"]
