"""Caches of two small layers that are fed the same tokens again and again."""

from __future__ import annotations

import torch

from kvkeep.attention.native import available
from kvkeep.cache import Cache
from kvkeep.spec import CacheSpec
from kvkeep.testing import conformance_specs, live_tokens
from support.pairwise import covering

HEADS, DIM, GROUP = 2, 16, 3
KINDS = ("keep_all", "window", "h2o", "vlen", "tova", "expected_attention", "adakv")
"""A policy for each kind of what is held beside keys and values: nothing, a reach, a score for each
head, more planes, a plane shared by heads, a memory of rows, heads of different lengths."""

OTHER_BITS = ("int6", "int5", "int2")
"""Codecs that differ from int3 in their number of bits only. What they compute is tested with the
codecs, the kernels and each policy's oracle."""

SPECS = covering(
    [
        spec
        for spec in conformance_specs()
        if spec.policy.name in KINDS and spec.key_codec.name not in OTHER_BITS
    ],
    lambda spec: (spec.policy.name, spec.key_codec.name, spec.storage.name),
)
"""Every two of a kind, a codec and a storage that go together."""

CHUNKS = (9, 1, 1, 5, 1)
PADDED = torch.tensor([[-1, -1, *range(7)], [*range(9)]])


def tokens(rows, n, seed=0):
    generator = torch.Generator().manual_seed(seed)
    heads = (HEADS * GROUP, HEADS, HEADS)
    return [torch.randn(rows, h, n, DIM, generator=generator) for h in heads]


def cache_of(spec):
    return Cache([CacheSpec.parse(str(spec)).layer(capacity=64) for _ in range(2)])


def feed(cache, n, seed, rows=2, position=None):
    out = [
        layer.step(*tokens(rows, n, seed + i), position, scale=0.3)
        for i, layer in enumerate(cache.layers)
    ]
    return torch.stack(out)


def filled(spec, steps, *, ragged):
    """A cache after some chunks, the first of which has padding if `ragged`."""
    cache = cache_of(spec)
    for step, n in enumerate(CHUNKS[:steps]):
        feed(cache, n, 10 * step, position=PADDED if ragged and not step else None)
    return cache


def go_on(cache, seed=500, rows=2):
    return [feed(cache, n, seed + 10 * i, rows) for i, n in enumerate((1, 12, 1))]


def same(outs, others):
    """To the last bit, which the native kernel promises; the others come near."""
    near = {} if available else {"atol": 1e-5, "rtol": 1e-5}
    return all(
        torch.allclose(a, b, **near) if near else a.equal(b)
        for a, b in zip(outs, others, strict=True)
    )


def held(cache):
    return [[[sorted(p) for p, _, _ in row] for row in live_tokens(x)] for x in cache.layers]
