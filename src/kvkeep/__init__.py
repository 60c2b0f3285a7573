"""kvkeep: the KV cache for PyTorch language models.

`kvkeep.attach(model)` and `kvkeep.Cache(model, "window:1024,sinks=4")` need transformers, which is
imported when they are first used and not before; importing kvkeep changes nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvkeep.attention import attend
from kvkeep.cache import CacheStats
from kvkeep.errors import KVKeepError
from kvkeep.layer import LayerCache
from kvkeep.spec import CacheSpec

if TYPE_CHECKING:
    from kvkeep.hf.attach import attach, detach
    from kvkeep.hf.cache import Cache

__version__ = "0.1.0"

__all__ = [
    "Cache",
    "CacheSpec",
    "CacheStats",
    "KVKeepError",
    "LayerCache",
    "attach",
    "attend",
    "detach",
]

_LAZY = {"Cache": "kvkeep.hf.cache", "attach": "kvkeep.hf.attach", "detach": "kvkeep.hf.attach"}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'kvkeep' has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)
