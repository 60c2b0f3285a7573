"""TextStore: slots of texts by identity and tokens, in memory within a budget and in a backend."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from kvkeep.cache import Cache
from kvkeep.errors import ShapeError, SpecError
from kvkeep.store.backend import Backend
from kvkeep.store.compressed import Compressed
from kvkeep.store.entries import Entries
from kvkeep.store.exchange import Exchange
from kvkeep.store.geometry import FindGeometry, ModelGeometry
from kvkeep.store.hit import Hit
from kvkeep.store.identity import flat
from kvkeep.store.layer_slices import (
    Pieces,
    require_storable,
    stored_slots,
    why_not_kept,
)
from kvkeep.store.stats import StoredNode, StoreStats


class TextStore:
    """Slots of texts with common beginnings, in a radix tree over token ids for each identity. The
    caller chooses the identity: it must cover everything that keys and values depend on except the
    tokens, such as the model's fingerprint and the cache's codecs. Threads may share a store.

    Args:
        budget: most bytes held; None: no limit. When it is reached, entries are evicted: the
            lowest priority first, then the least recently used. Locked entries and prefixes of
            other entries stay.
        backend: where blocks are also written, outside of this process; see
            `kvkeep.store.open_store`.
        block: tokens per block of the backend.

    Raises:
        SpecError: a budget or a block size below 1.
    """

    def __init__(self, budget: int | None, backend: Backend | None, block: int) -> None:
        self._entries = Entries(budget)
        if block < 1:
            raise SpecError(f"blocks of {block} tokens; give at least 1, such as 256")
        self.backend, self.block = backend, block
        self._exchange = None if backend is None else Exchange(self._entries, backend, block)
        self._hits = self._misses = self._hit_tokens = self._asked_tokens = 0
        self._refused = 0

    @property
    def budget(self) -> int | None:
        """Most bytes held; None: no limit."""
        return self._entries.budget

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self._entries.nbytes

    def match(self, identity: str, tokens: Tensor, geometry: FindGeometry | None = None) -> Hit:
        """The longest stored prefix of tokens, locked until the hit is released or no longer
        referenced.

        Args:
            tokens: int64 (n,).
            geometry: returns the model's geometry, with which blocks of the backend are compared.
                Called at most once per identity. None: read the backend only if the geometry is
                known from an earlier call or an insertion.
        """
        tokens = flat(tokens)
        self._fetch(identity, tokens, geometry)
        return self._counted(identity, tokens)

    def _fetch(self, identity: str, tokens: Tensor, geometry: FindGeometry | None) -> None:
        if self._exchange is not None:
            self._exchange.fetch(identity, tokens, geometry)

    def _counted(self, identity: str, tokens: Tensor) -> Hit:
        hit = self._entries.hit(identity, tokens)
        self._count(hit.length, len(tokens))
        return hit

    def insert(
        self,
        identity: str,
        tokens: Tensor,
        cache: Cache,
        *,
        row: int = 0,
        priority: int = 0,
        wait: bool = True,
    ) -> int:
        """Store the slots of a row's first tokens; tokens in the store are not copied again.

        Args:
            tokens: int64 (n,), the first n tokens fed to the row.
            priority: entries of higher priority are evicted later.
            wait: wait for the backend; otherwise a thread of the store writes to it, see `flush`.

        Returns:
            How many of the tokens are stored now: fewer than given if the budget is full of
            entries that cannot be evicted.

        Raises:
            ShapeError: more tokens than the cache was fed, or the row does not exist.
            UnsupportedError: the cache evicted tokens, or its slots also depend on other texts.
        """
        tokens = flat(tokens)
        if len(tokens) > cache.fed or not 0 <= row < max(1, cache.rows):
            raise ShapeError(
                f"{len(tokens)} tokens of row {row}, but the cache was fed {cache.fed} in "
                f"{cache.rows} rows"
            )
        if not len(tokens):
            return 0
        require_storable(cache, why_not_kept)
        content = Pieces([stored_slots(cache, row)])
        geometry = self._entries.agreed(identity, ModelGeometry.of_cache(cache))
        kept = self._entries.keep(identity, tokens, content, priority)
        if self._exchange is not None:
            write = self._exchange.write if wait else self._exchange.begin_write
            write(identity, tokens, content, geometry)
        return kept

    def offer(self, identity: str, tokens: Tensor, cache: Cache, **options: Any) -> int:
        """`insert` if the cache still holds all tokens; otherwise count the text as refused and
        return 0."""
        if any(map(why_not_kept, cache.layers)):
            self._refused += 1
            return 0
        return self.insert(identity, tokens, cache, **options)

    def flush(self) -> None:
        """Wait until the backend has received everything that was stored with `wait=False`."""
        if self._exchange is not None:
            self._exchange.flush()

    def clear(self) -> None:
        """Remove all entries that are not locked."""
        self._entries.clear()

    def check(self) -> None:
        """Raise StateError if the store is inconsistent."""
        self._entries.check()

    def stats(self) -> StoreStats:
        """All figures at once."""
        with self._entries.lock:
            nodes = list(self._entries.nodes())
            texts = [node for node in nodes if isinstance(node.content, Compressed)]
            return StoreStats(
                nbytes=self.nbytes,
                budget=self.budget,
                entries=sum(not node.children for node in nodes),
                tokens=sum(len(node.tokens) for node in nodes),
                compressed_entries=len(texts),
                compressed_tokens=sum(len(text.tokens) for text in texts),
                locked=sum(node.locked for node in nodes),
                hits=self._hits,
                misses=self._misses,
                hit_tokens=self._hit_tokens,
                asked_tokens=self._asked_tokens,
                evicted_bytes=self._entries.evicted,
                refused=self._refused,
            )

    def outline_of(self, identity: str, tokens: Tensor, most: int = 256) -> list[StoredNode]:
        """The outline of an identity's prefixes; see `outline`."""
        entries = self._entries
        with entries.lock:
            known = identity in entries.geometries
            return entries.tree(identity).outline(tokens, most) if known else []

    def prefixes(self, identity: str) -> Iterator[Tensor]:
        """The tokens of every entry."""
        with self._entries.lock:
            return iter([*self._entries.tree(identity).sequences()])

    def known(self, identity: str, tokens: Tensor, geometry: FindGeometry | None = None) -> int:
        """The length of the longest stored prefix; it is not counted as a hit or a miss. See
        `match` for `geometry`."""
        tokens = flat(tokens)
        self._fetch(identity, tokens, geometry)
        with self._entries.hit(identity, tokens) as hit:
            return hit.length

    def _count(self, found: int, asked: int) -> None:
        """Count a hit of `found` tokens, or a miss."""
        with self._entries.lock:
            self._hits, self._misses = self._hits + (found > 0), self._misses + (not found)
            self._hit_tokens += found
            self._asked_tokens += asked
