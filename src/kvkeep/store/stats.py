"""Statistics of a store, and the nodes of an outline of its prefixes."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, NamedTuple


class StoredNode(NamedTuple):
    """A run of tokens in a store, up to the point where stored prompts differ.

    Attributes:
        parent: index of the preceding run; -1 for the root, which has no tokens.
        tokens: number of tokens.
        nbytes: bytes of the tokens' slots.
        locked: whether a hit has locked the run.
        shared: number of the run's first tokens that are also in the given text.
        left_out: number of following runs that are not listed.
    """

    parent: int
    tokens: int
    nbytes: int
    locked: bool
    shared: int
    left_out: int


@dataclass(frozen=True)
class StoreStats:
    """Statistics of a store. `entries` and `tokens` include the `compressed_entries` and
    `compressed_tokens` of compressed texts. `hit_tokens` of `asked_tokens` were found.
    `refused` counts texts that could not be stored, for example because their cache had evicted
    tokens."""

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
