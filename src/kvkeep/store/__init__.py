"""Stores: what was computed for one prompt, for others that begin like it."""

from kvkeep.store.backend import Backend, Label, StoredBlock
from kvkeep.store.disk import Disk
from kvkeep.store.geometry import ModelGeometry
from kvkeep.store.hit import Hit
from kvkeep.store.lmcache import LMCache
from kvkeep.store.location import Location
from kvkeep.store.memory import Memory
from kvkeep.store.open_url import opened
from kvkeep.store.prefix import PrefixStore
from kvkeep.store.redis import Redis
from kvkeep.store.stats import StoredNode, StoreStats

__all__ = [
    "Backend",
    "Disk",
    "Hit",
    "LMCache",
    "Label",
    "Location",
    "Memory",
    "ModelGeometry",
    "PrefixStore",
    "Redis",
    "StoreStats",
    "StoredBlock",
    "StoredNode",
    "opened",
]
