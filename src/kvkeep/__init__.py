"""kvkeep: the KV cache for PyTorch language models.

Importing kvkeep changes nothing and is cheap: each public name is imported when it is first used.
`Cache`, `Graphed` and the functions except `attend` and `keep_until` import transformers; the
others import only torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvkeep.renamed import refuse_name
from kvkeep.version import __version__ as __version__

if TYPE_CHECKING:
    from kvkeep.attention import attend as attend
    from kvkeep.cache import CacheStats as CacheStats
    from kvkeep.errors import CapacityError as CapacityError
    from kvkeep.errors import KVKeepError as KVKeepError
    from kvkeep.errors import OutOfMemoryError as OutOfMemoryError
    from kvkeep.errors import PrecisionWarning as PrecisionWarning
    from kvkeep.errors import RollbackError as RollbackError
    from kvkeep.errors import SavedCacheError as SavedCacheError
    from kvkeep.errors import ShapeError as ShapeError
    from kvkeep.errors import SpecError as SpecError
    from kvkeep.errors import StateError as StateError
    from kvkeep.errors import UnsupportedError as UnsupportedError
    from kvkeep.generate.batch import Batch as Batch
    from kvkeep.generate.many import generate_many as generate_many
    from kvkeep.graph.program import Program as Program
    from kvkeep.hf.attach import attach as attach
    from kvkeep.hf.attach import detach as detach
    from kvkeep.hf.cache import Cache as Cache
    from kvkeep.hf.cuda_graph import Graphed as Graphed
    from kvkeep.hf.export import export as export
    from kvkeep.hf.fingerprint import fingerprint as fingerprint
    from kvkeep.hf.load import load as load
    from kvkeep.host.keep_until import keep_until as keep_until
    from kvkeep.layer.layer import LayerCache as LayerCache
    from kvkeep.spec import CacheSpec as CacheSpec
    from kvkeep.store.prefix import PrefixStore as PrefixStore

_HOME = {
    "Batch": "kvkeep.generate.batch",
    "Cache": "kvkeep.hf.cache",
    "CacheSpec": "kvkeep.spec",
    "CacheStats": "kvkeep.cache",
    "CapacityError": "kvkeep.errors",
    "Graphed": "kvkeep.hf.cuda_graph",
    "KVKeepError": "kvkeep.errors",
    "LayerCache": "kvkeep.layer.layer",
    "OutOfMemoryError": "kvkeep.errors",
    "PrecisionWarning": "kvkeep.errors",
    "PrefixStore": "kvkeep.store.prefix",
    "Program": "kvkeep.graph.program",
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
    "generate_many": "kvkeep.generate.many",
    "keep_until": "kvkeep.host.keep_until",
    "load": "kvkeep.hf.load",
}
"""Public name -> the module from which it is imported when it is first used. Type checkers read the
imports above instead."""

__all__ = list(_HOME)


_MOVED = {"calibrate": "kvkeep_lab.calibrate, of the package kvkeep-lab"}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        refuse_name(__name__, name, _MOVED)
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
