"""Stores: what was computed for one prompt, for others that begin like it.

A backend is known to `open_store` as soon as its class is imported here.
"""

from kvkeep.store.backend import Backend as Backend
from kvkeep.store.block import Label as Label
from kvkeep.store.block import StoredBlock as StoredBlock
from kvkeep.store.disk import Disk as Disk
from kvkeep.store.geometry import ModelGeometry as ModelGeometry
from kvkeep.store.hit import Hit as Hit
from kvkeep.store.lmcache import LMCache as LMCache
from kvkeep.store.location import Location as Location
from kvkeep.store.memory import Memory as Memory
from kvkeep.store.open_store import open_store as open_store
from kvkeep.store.prefix import PrefixStore as PrefixStore
from kvkeep.store.redis import Redis as Redis
from kvkeep.store.stats import StoredNode as StoredNode
from kvkeep.store.stats import StoreStats as StoreStats

__all__ = ["open_store", *(name for name, value in globals().items() if isinstance(value, type))]


def __getattr__(name: str) -> object:
    if name == "opened":  # `from kvkeep.store import opened` would hide the text of AttributeError
        raise ImportError("kvkeep.store.opened is kvkeep.store.open_store")
    raise AttributeError(f"module 'kvkeep.store' has no attribute {name!r}")
