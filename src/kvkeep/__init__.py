"""kvkeep: the KV cache for PyTorch language models.

Importing kvkeep changes nothing and is cheap: each public name is imported when it is first used.
`Cache`, `Graphed` and the functions except `attend` and `keep_until` import transformers; all other
names import only torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvkeep.registry import exports
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
    from kvkeep.hf.export import export as export
    from kvkeep.hf.loading.fingerprint import fingerprint as fingerprint
    from kvkeep.hf.steps.cuda_graph import Graphed as Graphed
    from kvkeep.host.keep_until import keep_until as keep_until
    from kvkeep.host.saving import load as load
    from kvkeep.layer.layer import LayerCache as LayerCache
    from kvkeep.spec import CacheSpec as CacheSpec
    from kvkeep.store.prefix import PrefixStore as PrefixStore

_HOMES = {
    "attention": ["attend"],
    "cache": ["CacheStats"],
    "errors": [
        *("CapacityError", "KVKeepError", "OutOfMemoryError", "PrecisionWarning", "RollbackError"),
        *("SavedCacheError", "ShapeError", "SpecError", "StateError", "UnsupportedError"),
    ],
    "generate.batch": ["Batch"],
    "generate.many": ["generate_many"],
    "graph.program": ["Program"],
    "hf.attach": ["attach", "detach"],
    "hf.cache": ["Cache"],
    "hf.steps.cuda_graph": ["Graphed"],
    "hf.export": ["export"],
    "hf.loading.fingerprint": ["fingerprint"],
    "host.keep_until": ["keep_until"],
    "host.saving": ["load"],
    "layer.layer": ["LayerCache"],
    "spec": ["CacheSpec"],
    "store.prefix": ["PrefixStore"],
}
"""The modules of the public names. Type checkers read the imports above instead."""

_MOVED = {"calibrate": "kvkeep_lab.calibrate, of the package kvkeep-lab"}

__getattr__, __all__ = exports(globals(), "", {}, _HOMES, _MOVED)
