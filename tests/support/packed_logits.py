"""The logits of texts that are fed in packed forwards."""

from __future__ import annotations

import torch

from kvkeep.host import Piece, host_of


@torch.no_grad()
def packed_logits(model, texts):
    """Logits (texts, V) of the last tokens of texts (n,): all tokens before them are fed in one
    forward, and the last ones in the next."""
    host = host_of(model)
    caches = [host.new_cache() for _ in texts]
    for at in (slice(0, -1), slice(-1, None)):
        pieces = [Piece(x[at], cache) for x, cache in zip(texts, caches, strict=True)]
        found = host.forward_packed(pieces)
    return found
