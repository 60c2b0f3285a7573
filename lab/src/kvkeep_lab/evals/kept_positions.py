"""Feeds a prompt to a cache, and says which tokens it kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kvkeep.host import ModelCache, Specs, host_of
from kvkeep.host.compress import compress, compresses
from kvkeep.host.progress import OnStart
from kvkeep_lab.bench.text import windows_of_text
from kvkeep_lab.evals.forward import require_positions

Kept = list[list[list[int]]]
"""Positions kept, ascending: layer -> kv head -> positions."""


def prompt_ids(model: Any, tokenizer: Any, prompt: str, context: int | None = None) -> Tensor:
    """Token ids (1, n) of a prompt; with `context`, of that many tokens of the standard library's
    help texts instead.

    Raises:
        ShapeError: no tokens, or more than the model's context.
    """
    host = host_of(model)
    if context is not None:
        require_positions(host, context)
        return windows_of_text(tokenizer, 1, context)
    ids: Tensor = tokenizer(prompt, return_tensors="pt", verbose=False).input_ids
    require_positions(host, ids.shape[1])
    return ids


@torch.inference_mode()
def fed(
    model: Any,
    ids: Tensor,
    spec: Specs,
    chunk: int | None = None,
    after: Callable[[ModelCache], None] = lambda cache: None,
    on_start: OnStart = lambda cache, tokens: None,
) -> ModelCache:
    """Feed ids (1, n) to a model that is not attached; returns its cache.

    Args:
        chunk: feed the tokens in chunks of that many; None: all at once.
        after: called with the cache after each chunk, and after `kvzip` has compressed it.
        on_start: called before they are fed, with the cache and the number of tokens.

    Raises:
        SpecError: the spec does not exist or does not fit the model.
        CapacityError: its fixed slots cannot hold the tokens.
    """
    host = host_of(model)
    cache = host.new_cache(spec, capacity=ids.shape[1])
    cache.admit(ids.shape[1])
    ids = ids.to(host.device)
    on_start(cache, ids.shape[1])
    with host.attach():
        for piece in torch.split(ids, chunk or ids.shape[1], dim=1):
            host.feed(piece, cache)
            after(cache)
        if compresses(cache):
            compress(host, cache, ids)
            after(cache)
    return cache


def kept(cache: ModelCache) -> Kept:
    """The positions that a cache of one row holds."""
    return [
        [sorted(p for p in head if p >= 0) for head in layer.positions()[0].tolist()]
        for layer in cache.layers
    ]


def shares(heads: Sequence[Sequence[int]], tokens: int) -> list[float]:
    """For each of `tokens` positions, the share of `heads` that keep it, 0 to 1."""
    counts = Counter(position for head in heads for position in head)
    return [counts[position] / len(heads) for position in range(tokens)]
