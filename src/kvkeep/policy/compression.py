"""Compression: how a text is compressed after a second reading."""

from __future__ import annotations

from typing import NamedTuple

from kvkeep.policy.share import Share


class Compression(NamedTuple):
    """How a text is compressed after a second reading; see `KVzip`.

    Args:
        tokens: the share of the slots to keep.
        sinks: number of first tokens that are kept.
        chunk: number of tokens that are read again at once.
        recent: number of newest tokens that are kept, at most.
        uniform: whether all heads keep the same number of slots.
    """

    tokens: Share
    sinks: int
    chunk: int
    recent: int
    uniform: bool

    def slots(self, tokens: int) -> int:
        """Average slots kept per head for a text of `tokens` tokens."""
        return max(self.tokens.of(tokens), min(self.sinks, tokens))
