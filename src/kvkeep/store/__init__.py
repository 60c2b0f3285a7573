"""Stores: what was computed for one prompt, reused by prompts that begin alike.

- The radix tree's keys are token ids. A hash only says where a backend looks; tokens and
  checksums of the block are compared. The tokens before a block are known by a chained SHA-256
  alone; XXH3 is a checksum.
- The planes of a block and their shapes come from the model, never from a backend. A block that
  disagrees is a miss.
- An identity is everything else that slots depend on: weights, adapters, rotary parameters,
  dtypes, autocast, codecs, whether attention is kvkeep's, and a namespace. A model with hooks of
  its user has no identity and is refused.
- Slots of `keep_all` are stored, plain or in a codec that encodes each token for itself. A cache
  with a budget begins with the plain slots (`beginning`); a policy that needs mass or queries is
  fed the last tokens itself.
- `generate()` asks a store where transformers would build a plain `DynamicCache`, and nowhere
  else. Rows of a batch share the tokens with which all begin.
- A model with recurrent layers stores their states at some tokens; a hit ends at the last of
  these points.
- A hit is a list of frozen runs, so a cache filled by it copies nothing and outlives the entry.
  An entry that a hit locks, or that other entries begin with, is not evicted. Bytes and locks are
  looked up, never counted, so an interrupt leaves them right.
- A text compressed by `kvzip` is one entry outside the tree: its heads keep different tokens.
- An activated adapter (aLoRA) computes tokens from its invocation on; their keys carry 32 bits of
  the adapter's hash, so the base model and all adapters share the tokens before it.
"""

from typing import NoReturn

from kvkeep.renamed import refuse_name
from kvkeep.store.backend import Backend
from kvkeep.store.block import Label, StoredBlock
from kvkeep.store.disk import Disk
from kvkeep.store.geometry import ModelGeometry
from kvkeep.store.hit import Hit
from kvkeep.store.lmcache import LMCache
from kvkeep.store.location import Location
from kvkeep.store.memory import Memory
from kvkeep.store.open_store import open_store
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
    "open_store",
]


def __getattr__(name: str) -> NoReturn:
    refuse_name(__name__, name, {"opened": "kvkeep.store.open_store"})
