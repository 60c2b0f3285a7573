"""Rollback: how many of a layer's newest tokens can be removed exactly."""

from __future__ import annotations

from kvkeep.codec import Codec
from kvkeep.errors import RollbackError
from kvkeep.layer.history import History
from kvkeep.layer.reaching import limit_in_words
from kvkeep.planes import Reach
from kvkeep.policy import Policy


class Rollback:
    """The methods of `LayerCache` that say what `crop` can do."""

    policy: Policy
    key_codec: Codec
    window: int | None
    chunked: bool
    _history: History

    @property
    def rollback_limit(self) -> int:
        """How many of the newest tokens `crop` can remove exactly."""
        return self._history.columns - self._history.floor if self.policy.rollback else 0

    def require_rollback(self, tokens: int) -> None:
        """Raise RollbackError when the newest `tokens` tokens cannot be removed."""
        if tokens < 0:
            raise RollbackError(
                f"crop({-tokens}) is positive; to remove the newest {-tokens} tokens, call "
                f"crop({tokens})"
            )
        if tokens > self.rollback_limit:
            raise RollbackError(
                f"crop of {tokens} tokens, but {self.rollback_limit} can be removed exactly: "
                f"{self._history.columns} were fed{self._why_lasting}"
            )

    @property
    def _why_lasting(self) -> str:
        """Why some tokens cannot be removed, and the remedy; empty if all of them can."""
        policy, again = self.policy, "reset() and feed the tokens again"
        if not policy.rollback:
            return f", and policy {policy.name} cannot undo a step; {again}, or use keep_all"
        if not self._history.floor:
            return ""
        if not policy.evicts and self.key_codec.block == 1:
            return f", and the tokens of images share positions; {again}"
        if not policy.evicts:
            codec = self.key_codec.name
            return f", and codec {codec} encodes tokens in blocks; {again}, or use int8"
        if self.window is not None and policy.reach == Reach(self.window):
            limit = limit_in_words(self.window, self.chunked)
            return f", and {limit} drops the older ones; {again}"
        return f", and policy {policy.name} evicted some; {again}, or use keep_all"
