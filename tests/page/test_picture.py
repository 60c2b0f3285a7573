"""Pictures: what they say of each token is what the cache holds."""

from __future__ import annotations

import json

import pytest
import torch
from support.sweep_models import model_of
from support.tiny_models import tiny
from support.two_layer_caches import SPECS, feed, filled

from kvkeep.codec import keeps_plain
from kvkeep.host import host_of
from kvkeep.page.picture import (
    ALPHABET,
    ENCODED,
    KEPT,
    SHARED,
    Held,
    Span,
    Taken,
    picture,
    states,
    taken,
)
from kvkeep.spec import CacheSpec

OWN, CODED, COMMON = KEPT, KEPT + ENCODED, KEPT + SHARED


def layer_of(spec, *chunks):
    layer = CacheSpec.parse(spec).layer(capacity=64)
    step(layer, *chunks)
    return layer


def step(layer, *chunks):
    for n in chunks:
        layer.step(*torch.randn(3, 1, 2, n, 16), scale=0.25)


def seen(layer):
    return states(Held.of(layer, 0, 0, ""), int(layer.seen[0])).expand(2, -1).tolist()


@pytest.mark.parametrize(("ragged", "frozen"), [(True, False), (False, True)])
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_what_is_kept_is_what_the_slots_hold(spec, ragged, frozen):
    cache = filled(spec, 3, ragged=ragged)
    if frozen:
        cache.freeze()
        feed(cache, 2, 700)
    plain = spec.key_codec.name == spec.value_codec.name == "plain"
    for layer in cache.layers:
        for row, tokens in enumerate(layer.seen.tolist()):
            found = states(Held.of(layer, row, 0, ""), tokens)
            positions_of_heads = layer.positions()[row]
            for head, positions in zip(found.expand(2, -1), positions_of_heads, strict=True):
                kept = head.nonzero().flatten().tolist()
                assert kept == sorted(p for p in positions.tolist() if p >= 0)
                assert (head[kept] & KEPT).all()
                if plain or not keeps_plain(spec.key_codec, spec.value_codec):
                    assert ((head[kept] & ENCODED > 0) != plain).all()


@pytest.mark.parametrize(
    ("spec", "first", "rest"),
    [
        ("window:6", [0] * 4, [OWN] * 6),
        ("window:6,sinks=2+int8", [CODED] * 2 + [0] * 2, [CODED] * 6),
        ("keep_all+plain/int8", [CODED] * 4, [CODED] * 6),
        ("keep_all+kivi:4,together=4,recent=2,sinks=0", [CODED] * 4, [CODED] * 4 + [OWN] * 2),
    ],
)
def test_what_is_evicted_and_encoded(spec, first, rest):
    assert seen(layer_of(spec, 9, 1)) == [first + rest] * 2


def test_blocks_are_encoded_and_sinks_and_the_newest_are_not():
    layer = layer_of("keep_all+kivi:4,together=4,recent=2,sinks=2", 9)
    assert seen(layer)[0] == [OWN] * 2 + [CODED] * 4 + [OWN] * 3
    layer.freeze()  # the blocks; forks copy the tail
    assert seen(layer.fork())[1] == [OWN] * 2 + [CODED | SHARED] * 4 + [OWN] * 3


def test_frozen_slots_are_shared_until_one_of_them_is_evicted():
    layer = layer_of("h2o:8", 5)
    layer.freeze()
    fork = layer.fork()
    step(fork, 2)
    assert seen(layer) == [[COMMON] * 5] * 2
    assert seen(fork) == [[COMMON] * 5 + [OWN] * 2] * 2
    step(fork, 2)
    assert {state for head in seen(fork) for state in head} == {0, OWN}  # copied
    assert seen(layer) == [[COMMON] * 5] * 2


def test_what_heads_have_in_common_is_copied_once():
    held = Held.of(layer_of("window:6", 9), 0, 0, "some")
    assert (len(held.positions), held.heads) == (1, 2)
    made = picture(Taken(9, (held,), 0, 0))["layers"][0]
    assert (made["heads"], made["kept"]) == (2, [6])


def test_hidden_slots_are_not_kept():
    layer = layer_of("h2o:8", 8)
    layer.record_past = True
    step(layer, 1)
    assert layer.slots.hidden == 1
    assert [sum(map(bool, head)) for head in seen(layer)] == [8, 8]


def decoded(cells):
    return [(code >> 2, code & 3) for code in map(ALPHABET.index, cells)]


def test_a_long_text_is_shown_in_columns():
    positions = torch.tensor([[0, 1, 2, 3, 4, 9, 10, -1], [3, -1, 5, 9, 10, 11, 12, 13]])
    spans = (Span(3, True, False), Span(5, False, True))
    held = Held(0, "some", positions.to(torch.int32), spans, 2)
    made = picture(Taken(14, (held, held), 5, 9), list("abcdefghijklmn"), prompt=7, columns=64)
    assert made["group"] == 1
    assert made["texts"] == list("abcdefghijklmn")
    layer = made["layers"][0]
    assert (layer["kept"], layer["heads"], layer["spec"]) == ([7, 7], 2, "some")
    assert decoded(layer["cells"][0])[:5] == [(15, 1)] * 3 + [(15, 2)] * 2
    long = Taken(14 * 64, (held,), 5, 9)
    made = picture(long, ["ab"] * 14 * 64, columns=64)
    assert made["group"] == 14
    assert made["prompt"] == 14 * 64
    assert made["texts"] == ["ab" * 14] * 64
    first, second = made["layers"][0]["cells"]
    assert decoded(first)[:2] == [(8, 2), (0, 0)]  # 7 of 14: most are encoded, 3 shared
    assert decoded(second)[0] == (8, 2)
    assert made["layers"][0]["kept"] == [7, 7]
    last = picture(Taken(130, (held,), 5, 9), ["x" * 99] * 130, columns=64)
    assert last["group"] == 3
    assert len(last["texts"]) == len(last["layers"][0]["cells"][0]) == 44
    assert {len(text) for text in last["texts"]} == {40}


@pytest.mark.parametrize("kept", [1, 9, 1999])
def test_only_none_is_shown_as_none_and_only_all_as_all(kept):
    held = Held(
        0, "some", torch.arange(kept, dtype=torch.int32)[None], (Span(kept, False, False),), 1
    )
    cells = picture(Taken(2000, (held,), 0, 0), columns=1)["layers"][0]["cells"][0]
    shares = [share for share, _ in decoded(cells)]
    assert len(shares) == 63
    assert shares[0] in range(1, 15) if kept < 32 else shares[0] == 15
    assert shares[-1] == (0 if kept < 1969 else 14)


def test_many_heads_get_fewer_columns():
    held = Held(0, "some", torch.full((64, 1), -1, dtype=torch.int32), (Span(1, False, False),), 64)
    made = picture(Taken(4096, (held,) * 40, 0, 0), ["the"] * 4096)
    assert made["group"] == 64
    assert len(made["layers"][0]["cells"]) == 1  # all heads alike
    assert made["layers"][0]["heads"] == 64


@pytest.mark.parametrize(
    ("kind", "spec"),
    [
        ("llama", "keep_all"),
        ("llama", "window:8+int8"),
        ("llama", "adakv(h2o:6)"),
        ("gemma2", "window:4"),  # has a window in every other layer
    ],
)
def test_bytes_are_those_of_the_cache_and_of_a_full_one(kind, spec):
    host = host_of(tiny(kind))
    cache, full = host.new_cache(spec), host.new_cache("keep_all")
    ids = torch.arange(20)[None]
    assert picture(taken(cache))["tokens"] == 0
    with host.attach(), torch.inference_mode():
        for chunk in ids.split(19, dim=1):
            host.forward(chunk, cache)
            host.forward(chunk, full)
    made = picture(taken(cache), [str(i) for i in range(20)], prompt=25, found=4)
    assert made["live_bytes"] == cache.live_bytes
    assert made["full_bytes"] == full.live_bytes
    assert (made["tokens"], made["prompt"], made["found"]) == (20, 20, 4)
    assert [layer["spec"] for layer in made["layers"]] == list(map(str, cache.specs))
    assert json.loads(json.dumps(made)) == made


def test_of_a_hybrid_the_layers_that_attend_are_shown():
    host = host_of(model_of("lfm2"))
    types = host.model.config.layer_types
    cache = host.new_cache("window:8")
    with host.attach(), torch.inference_mode():
        host.forward(torch.arange(2, 14)[None], cache)
    made = picture(taken(cache))
    assert 0 < len(made["layers"]) == len(cache.layers) < host.model.config.num_hidden_layers
    assert made["live_bytes"] == cache.live_bytes - cache.carried.nbytes
    assert made["layers"][0]["kept"] == [8]
    places = [place for place, name in enumerate(types) if name == "full_attention"]
    assert [layer["place"] for layer in made["layers"]] == places != list(range(len(places)))
