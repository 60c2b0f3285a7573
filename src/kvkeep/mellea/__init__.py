"""KVKeepBackend: a backend for Mellea whose prompts share cached prefixes and blocks."""

from kvkeep.mellea.backend import KVKeepBackend
from kvkeep.mellea.caching import CACHING, Caching
from kvkeep.mellea.call import report_of
from kvkeep.mellea.marks import cached

__all__ = ["CACHING", "Caching", "KVKeepBackend", "cached", "report_of"]
