"""`h2o` keeps what the published algorithm keeps (arXiv 2306.14048): a heavy and a recent half."""

from __future__ import annotations

import math

import pytest
import torch

from kvkeep.spec import CacheSpec
from kvkeep.testing import live_tokens

HEADS, DIM, SCALE = 3, 8, 0.4


def published(q, k, chunks, heavy, recent):
    """Positions kept after each chunk of one head, from queries and keys (T, D) in float64: the
    newest `recent`, and of the others the `heavy` with the greatest sum of attention weights."""
    kept, total, start = [], torch.zeros(len(k)).double(), 0
    for n in chunks:
        kept += range(start, start + n)
        for now in range(start, start + n):
            seen = [p for p in kept if p <= now]
            weight = [math.exp(SCALE * float(q[now] @ k[p])) for p in seen]
            total[seen] += torch.tensor(weight).double() / sum(weight)
        start += n
        if len(kept) > heavy + recent:
            old, new = kept[: len(kept) - recent], kept[len(kept) - recent :]
            kept = sorted(old[i] for i in total[old].topk(heavy).indices.tolist()) + new
        yield list(kept)


@pytest.mark.parametrize(
    ("spec", "heavy", "recent"),
    [("h2o:8", 4, 4), ("h2o:9", 5, 4), ("h2o:10,recent=3", 7, 3), ("h2o:6,recent=0", 6, 0)],
)
def test_one_sequence(spec, heavy, recent):
    q, k, v = torch.randn(3, 1, HEADS, 40, DIM, generator=torch.Generator().manual_seed(3))
    chunks = [16] + [1] * 24
    heads = [published(q[0, h].double(), k[0, h].double(), chunks, heavy, recent) for h in range(3)]
    layer, start = CacheSpec.parse(spec).layer(), 0
    for n, *expected in zip(chunks, *heads, strict=True):
        layer.step(*(x[:, :, start : start + n] for x in (q, k, v)), scale=SCALE)
        start += n
        assert [sorted(place) for place, _, _ in live_tokens(layer)[0]] == expected
