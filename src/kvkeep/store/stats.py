"""A store's figures."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class StoreStats:
    """A store's figures. `hit_tokens` of `asked_tokens` were found; `refused` texts could not be
    stored, because their cache had evicted some tokens."""

    nbytes: int
    budget: int | None
    entries: int
    tokens: int
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
