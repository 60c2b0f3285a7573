"""Feeds a model through a cache: a context at once or in chunks, then one token at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kvkeep.codec import Plain
from kvkeep.errors import ShapeError
from kvkeep.host import Host, ModelCache
from kvkeep.policy import Need


def fill(host: Host, cache: ModelCache, ids: Tensor, chunk: int | None = None) -> Tensor:
    """Feed ids (B, n), at once or in chunks of `chunk` tokens; returns the logits (B, V) after the
    last token."""
    *before, last = torch.split(ids, chunk or ids.shape[1], dim=1)
    for piece in before:
        host.feed(piece, cache)
    return host.forward(last, cache)[:, -1]


def follow(host: Host, cache: ModelCache, first: Tensor, ids: Tensor) -> Iterator[Tensor]:
    """Yield the logits (B, V) that predict each token of ids (B, N): `first`, then the logits after
    each token but the last. Tokens are fed one at a time, as in generation."""
    yield first
    for token in ids[:, :-1].unbind(dim=1):
        yield fill(host, cache, token[:, None])


def reads_exactly(cache: ModelCache) -> bool:
    """Whether a context that is fed at once is read as by a full cache: no codes are read, no
    centre is measured on its queries, and no policy observes it or limits what queries see. The
    cache can then begin with the full cache's slots."""
    return all(
        (layer.slots.late or (layer.key_codec, layer.value_codec) == (Plain(), Plain()))
        and not layer.key_codec.centre
        and layer.policy.reach is None
        and not layer.policy.needs & {Need.MASS, Need.QUERIES}
        for layer in cache.layers
    )


def require_positions(host: Host, context: int, more: int = 0) -> None:
    """Check that a context is not empty and that it and `more` tokens fit the model's context.

    Raises:
        ShapeError: the context is empty or too long.
    """
    if context < 1:
        raise ShapeError(f"a context of {context} tokens; give at least 1")
    most = host.context
    if most is not None and context + more > most:
        after = f" and {more} more" if more else ""
        raise ShapeError(
            f"a context of {context}{after} tokens, but the model holds {most}; use a context of "
            f"at most {most - more}"
        )
