"""Pictures: what they say of each token is what the cache holds."""

from __future__ import annotations

import pytest
import torch
from support.two_layer_caches import SPECS, feed, filled

from kvkeep.page.picture import ENCODED, KEPT, Held, states
from kvkeep.spec import CacheSpec


def seen_states(layer, row=0):
    held = Held.of(layer, row, "")
    return states(held, int(layer.seen[row])).tolist()


def layer_of(spec, *chunks, rows=1):
    layer = CacheSpec.parse(spec).layer(capacity=64)
    for n in chunks:
        layer.step(*torch.randn(3, rows, 2, n, 16), scale=0.25)
    return layer


@pytest.mark.parametrize("frozen", [False, True], ids=["", "frozen"])
@pytest.mark.parametrize("ragged", [False, True], ids=["even", "ragged"])
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_what_is_kept_is_what_the_slots_hold(spec, ragged, frozen):
    cache = filled(spec, 3, ragged=ragged)
    if frozen:
        cache.freeze()
        feed(cache, 2, 700)
    for layer in cache.layers:
        for row, tokens in enumerate(layer.seen.tolist()):
            found = states(Held.of(layer, row, ""), tokens)
            for head, positions in zip(found, layer.positions()[row], strict=True):
                kept = head.nonzero().flatten().tolist()
                assert kept == sorted(p for p in positions.tolist() if p >= 0)
                assert all(head[kept] & KEPT)
                if spec.key_codec.name == spec.value_codec.name == "plain":
                    assert not any(head & ENCODED)
