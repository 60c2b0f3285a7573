"""KV blocks: runs of tokens that were computed by themselves, used together in other places."""

from kvkeep.blocks.join import join
from kvkeep.blocks.prefill import prefill

__all__ = ["join", "prefill"]
