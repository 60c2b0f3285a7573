"""Stores: slots computed for one prompt, reused by prompts with the same beginning.

- The keys of the radix tree are token ids. In a backend, a hash only finds a block; the block's
  tokens and checksums are then compared. Only the tokens before a block are identified by a hash, a
  chained SHA-256. Checksums are XXH3.
- The model determines a block's planes and their shapes. A block that differs is a miss.
- An identity covers everything that slots depend on except the tokens: weights, adapters, rotary
  parameters, dtypes, autocast, codecs, whether attention is kvkeep's, and a namespace. A model with
  hooks of its user has no identity and is refused.
- Stores hold slots of `keep_all`, plain or in a codec that encodes single tokens. A cache with a
  budget begins with plain slots (`beginning`). If its policy needs mass or queries, the last tokens
  are fed again.
- `generate()` uses a store only if transformers would build a plain `DynamicCache`. Rows of a batch
  share their common beginning.
- The states of recurrent layers are stored after some tokens; a hit ends at one of these tokens.
- A hit is a list of frozen runs: filling a cache with it copies nothing, and the cache may outlive
  the entry. Entries that a hit locks, or that are prefixes of other entries, are not evicted. Bytes
  and locks are computed from the entries, not counted, so an interrupt cannot make them wrong.
- A text compressed by `kvzip` is one entry below the root, found only as a whole, because its heads
  keep different tokens.
- An activated adapter (aLoRA) computes tokens from its invocation on. The tree keys of these tokens
  carry 32 bits of the adapter's hash; tokens before the invocation are shared by the base model and
  all adapters.
"""

from typing import NoReturn

from kvkeep.renamed import refuse_name
from kvkeep.store.backend import Backend
from kvkeep.store.block import Label as Label
from kvkeep.store.block import StoredBlock
from kvkeep.store.disk import Disk
from kvkeep.store.geometry import ModelGeometry as ModelGeometry
from kvkeep.store.hit import Hit as Hit
from kvkeep.store.lmcache import LMCache
from kvkeep.store.location import Location
from kvkeep.store.memory import Memory
from kvkeep.store.open_store import open_store
from kvkeep.store.prefix import PrefixStore
from kvkeep.store.redis import Redis
from kvkeep.store.stats import StoredNode as StoredNode
from kvkeep.store.stats import StoreStats

__all__ = [
    "Backend",
    "Disk",
    "LMCache",
    "Location",
    "Memory",
    "PrefixStore",
    "Redis",
    "StoreStats",
    "StoredBlock",
    "open_store",
]


def __getattr__(name: str) -> NoReturn:
    refuse_name(__name__, name, {"opened": "kvkeep.store.open_store"})
