"""Stores: what was computed for one prompt, for others that begin like it."""

from kvkeep.store.prefix import Hit, PrefixStore, StoreStats

__all__ = ["Hit", "PrefixStore", "StoreStats"]
