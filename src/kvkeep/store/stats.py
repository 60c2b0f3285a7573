"""Statistics of a store."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class StoreStats:
    """Statistics of a store. Of its entries and tokens, `compressed_entries` and
    `compressed_tokens` belong to compressed texts. `hit_tokens` of `asked_tokens` were found;
    `refused` counts texts that could not be stored, for example because their cache had evicted
    some tokens."""

    nbytes: int
    budget: int | None
    entries: int
    tokens: int
    compressed_entries: int
    compressed_tokens: int
    locked: int
    hits: int
    misses: int
    hit_tokens: int
    asked_tokens: int
    evicted_bytes: int
    refused: int

    def asdict(self) -> dict[str, Any]:
        """Plain numbers, ready for JSON."""
        return asdict(self)
