"""What a store tells of itself: statistics, and an outline of its prefixes."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, NamedTuple


class StoredNode(NamedTuple):
    """A run of tokens in a store, up to the point where stored prompts differ.

    `parent` is the index of the run that it follows, -1 for the root, which has no tokens;
    `tokens` and `nbytes` what it holds; `locked` whether a reader has locked it; `shared` how many
    of its first tokens are those of the text that was asked about; `left_out` how many of the runs
    that follow it are not listed.
    """

    parent: int
    tokens: int
    nbytes: int
    locked: bool
    shared: int
    left_out: int


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
