"""KV blocks: runs of tokens that were computed by themselves, used together in other places."""

from kvkeep.blocks.join import join

__all__ = ["join"]
