"""Caches whose slots say which tokens they are of, for tests of stores."""

from __future__ import annotations

import torch

from kvkeep.cache import Cache
from kvkeep.spec import CacheSpec

WIDTH, LAYERS = 4, 2
TOKEN_BYTES = LAYERS * (2 * WIDTH * 4 + 4)


def slots_of(tokens):
    """Keys of some tokens, (1, 1, n, WIDTH), which depend on all tokens before each, too."""
    state, found = 7, []
    for token in tokens:
        state = (state * 31 + int(token) + 1) % 65521
        found.append([state % 101, state % 103, state % 107, state])
    return torch.tensor(found, dtype=torch.float32).reshape(1, 1, -1, WIDTH)


def new_cache(spec="keep_all"):
    return Cache(CacheSpec.parse(spec).layer() for _ in range(LAYERS))


def fed(tokens, cache=None):
    """A cache that was fed tokens, from where it stands."""
    cache = cache or new_cache()
    start = cache.fed
    for index, layer in enumerate(cache.layers):
        keys = slots_of(tokens)[:, :, start:] + index
        layer.extend(keys, keys.clone())
        layer.settle()
    return cache


def holds(cache, tokens):
    """Whether a cache holds what these tokens gave, and nothing else."""
    return cache.fed == len(tokens) and all(
        not tokens
        or torch.cat([s.keys(torch.float32) for s in layer.slots.segments()], dim=2).equal(
            slots_of(tokens) + index
        )
        for index, layer in enumerate(cache.layers)
    )


def longest(entries, tokens):
    """The longest common prefix with any entry, by brute force."""

    def common(entry):
        same = 0
        while same < min(len(entry), len(tokens)) and entry[same] == tokens[same]:
            same += 1
        return same

    return max(map(common, entries), default=0)
