"""kvkeep: the KV cache for PyTorch language models.

Importing kvkeep changes nothing and is cheap: each public name is imported when it is first used.
`Cache`, `Graphed` and the functions except `attend` import transformers; the others import only
torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvkeep.attention import attend
    from kvkeep.cache import CacheStats
    from kvkeep.errors import (
        CapacityError,
        KVKeepError,
        OutOfMemoryError,
        RollbackError,
        SavedCacheError,
        ShapeError,
        SpecError,
        StateError,
        UnsupportedError,
    )
    from kvkeep.graph.program import Program
    from kvkeep.hf.attach import attach, detach
    from kvkeep.hf.cache import Cache
    from kvkeep.hf.cuda_graph import Graphed
    from kvkeep.hf.export import export
    from kvkeep.hf.fingerprint import fingerprint
    from kvkeep.hf.load import load
    from kvkeep.layer.layer import LayerCache
    from kvkeep.spec import CacheSpec
    from kvkeep.store.prefix import PrefixStore

__version__ = "0.1.0"

__all__ = [
    "Cache",
    "CacheSpec",
    "CacheStats",
    "CapacityError",
    "Graphed",
    "KVKeepError",
    "LayerCache",
    "OutOfMemoryError",
    "PrecisionWarning",
    "PrefixStore",
    "Program",
    "RollbackError",
    "SavedCacheError",
    "ShapeError",
    "SpecError",
    "StateError",
    "UnsupportedError",
    "attach",
    "attend",
    "detach",
    "export",
    "fingerprint",
    "load",
]

_HOME = {
    "Cache": "kvkeep.hf.cache",
    "CacheSpec": "kvkeep.spec",
    "CacheStats": "kvkeep.cache",
    "CapacityError": "kvkeep.errors",
    "Graphed": "kvkeep.hf.cuda_graph",
    "KVKeepError": "kvkeep.errors",
    "LayerCache": "kvkeep.layer.layer",
    "PrecisionWarning": "kvkeep.errors",
    "PrefixStore": "kvkeep.store.prefix",
    "Program": "kvkeep.graph.program",
    "OutOfMemoryError": "kvkeep.errors",
    "RollbackError": "kvkeep.errors",
    "SavedCacheError": "kvkeep.errors",
    "ShapeError": "kvkeep.errors",
    "SpecError": "kvkeep.errors",
    "StateError": "kvkeep.errors",
    "UnsupportedError": "kvkeep.errors",
    "attach": "kvkeep.hf.attach",
    "attend": "kvkeep.attention",
    "detach": "kvkeep.hf.attach",
    "export": "kvkeep.hf.export",
    "fingerprint": "kvkeep.hf.fingerprint",
    "load": "kvkeep.hf.load",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'kvkeep' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
