"""Blocks of a backend fit the model, or are put aside: what others wrote is never taken at its
word."""

from __future__ import annotations

import json

import pytest
import torch
from support.store_places import blocks_of, found, found_in, geometry, put
from support.tiny_models import tiny
from support.token_caches import fed, new_cache

import kvkeep
from kvkeep.files.headers import sealed
from kvkeep.geometry import Geometry
from kvkeep.planes import POSITION
from kvkeep.store import Disk, Memory, PrefixStore, StoredBlock
from kvkeep.store.entries import Entries
from kvkeep.store.exchange import Exchange
from kvkeep.store.layer_slices import Stretch

TOKENS = list(range(24))


def other(block, *, planes=lambda layer: layer, routed=None, geometries=None):
    """A block with other content, as whoever may write to a store can seal it."""
    layers = [planes(dict(layer)) for layer in block.content.layers]
    stretch = Stretch(layers, len(block.tokens))
    routed = block.routed if routed is None else routed
    return StoredBlock(
        block.identity, block.prefix, block.tokens, stretch, routed, geometries or block.geometries
    )


def each_plane(change):
    return lambda layer: {name: change(name, x) for name, x in layer.items()}


def two_heads(name, x):
    return x if name == POSITION else x.expand(-1, 2, -1, -1).contiguous()


CHANGES = {
    "another width": {"planes": each_plane(lambda n, x: x if n == POSITION else x[..., :2])},
    "another dtype": {"planes": each_plane(lambda n, x: x if n == POSITION else x.double())},
    "keys of two heads": {"planes": each_plane(lambda n, x: two_heads(n, x) if n == "k" else x)},
    "two heads": {
        "planes": each_plane(two_heads),
        "geometries": [Geometry(1, 2, 4, 4, torch.float32)] * 2,
    },
    "other values' width": {"geometries": [Geometry(1, 1, 4, 8, torch.float32)] * 2},
    "fewer layers": {"geometries": [Geometry(1, 1, 4, 4, torch.float32)]},
    "a plane more": {"planes": lambda layer: layer | {"k_scale": layer["k"]}},
    "a plane fewer": {"planes": lambda layer: {"k": layer["k"], POSITION: layer[POSITION]}},
    "other positions": {"planes": each_plane(lambda n, x: x + 3 if n == POSITION else x)},
    "wide positions": {"planes": each_plane(lambda n, x: x.long() if n == POSITION else x)},
    "another way of attention": {"routed": True},
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("which", [0, 1])
def test_what_does_not_fit_the_model_is_put_aside(tmp_path, change, which):
    """Also the first block that a process ever sees, with which there is nothing to compare."""
    blocks = blocks_of(TOKENS)
    if change == "fewer layers":
        stretch = Stretch(blocks[which].content.layers[:1], 8)
        first = blocks[which]
        geometries = CHANGES[change]["geometries"]
        blocks[which] = StoredBlock(
            "m", first.prefix, first.tokens, stretch, first.routed, geometries
        )
    else:
        blocks[which] = other(blocks[which], **CHANGES[change])
    disk = Disk(tmp_path / "store")
    assert disk.put_all(blocks) == 3
    assert found(disk, TOKENS) == 8 * which
    assert disk.damaged == 1
    assert len(list((disk.path / "quarantine").iterdir())) == 1
    assert put(disk, TOKENS) == 24
    assert found(disk, TOKENS) == 24


def test_without_the_models_geometry_a_backend_is_not_believed():
    memory = Memory()
    put(memory, TOKENS)
    store = PrefixStore(backend=memory, block=8)
    with store.match("m", torch.tensor(TOKENS)) as hit:
        assert hit.length == 0
    store.insert("m", torch.tensor(TOKENS[:2]), fed(TOKENS[:2]))
    with store.match("m", torch.tensor(TOKENS)) as hit:  # known by what was computed here
        assert hit.length == 24
    asked = []

    def once():
        asked.append(1)
        return geometry()

    store = PrefixStore(backend=memory, block=8)
    for tokens in ([99], TOKENS, [*TOKENS, 5]):
        store.match("m", torch.tensor(tokens), once).release()
    assert asked == [1]


def test_a_hit_fits_only_the_heads_it_was_stored_with():
    """Two models under one identity, of whom the second one has fewer heads."""
    store, tokens = PrefixStore(), torch.tensor(TOKENS)
    store.insert("m", tokens, fed(TOKENS))
    with store.match("m", tokens) as hit:
        assert hit.fits(new_cache())
        assert not hit.fits(new_cache("keep_all+int8"))
        cache = new_cache()
        hit.fill(cache)
    for layer in cache.layers:
        assert layer.history.geometry[:4] == (1, 1, 4, 4)
        k = torch.zeros(1, 3, 1, 4)
        with pytest.raises(kvkeep.ShapeError):
            layer.extend(k, k)


@pytest.mark.parametrize("attached", [False, True])
def test_a_block_of_one_head_for_a_model_of_two(tmp_path, attached):
    """The native kernel once read past its end."""
    model, prompt = tiny("llama"), torch.arange(2, 40)
    if attached:
        kvkeep.attach(model)
    whole = PrefixStore().prefill(model, prompt)
    memory = Memory()
    PrefixStore(backend=memory, block=16).prefill(model, prompt)
    planes = each_plane(lambda name, x: x if name == POSITION else x[:, :1].contiguous())
    bad = [other(block, planes=planes) for block in memory._blocks.values()]
    disk = Disk(tmp_path / "store")
    assert disk.put_all(bad) == 3
    store = PrefixStore(backend=disk, block=16)
    cache = store.prefill(model, prompt)
    assert store.stats().hit_tokens == 0
    assert cache.live_bytes == whole.live_bytes
    assert len(list((disk.path / "quarantine").iterdir())) >= 1
    other_store = PrefixStore(backend=disk, block=16)
    other_store.prefill(model, prompt)
    assert other_store.stats().hit_tokens == 37


@pytest.mark.parametrize("backend", [None, Memory])
def test_autocast_and_plain_in_one_store(backend):
    """Under autocast keys have another type: they are entries of their own."""
    model, prompt = tiny("llama"), torch.randint(2, 96, (1, 30))
    kept = backend and backend()
    options = {"max_new_tokens": 4, "do_sample": False}
    said = {}
    for _ in range(2):
        store = PrefixStore(backend=kept, block=8)
        kvkeep.attach(model, store=store)
        for turn in range(4):
            with torch.autocast("cpu", torch.bfloat16, enabled=turn % 2 == 1):
                text = model.generate(prompt, **options).tolist()
            assert text == said.setdefault(turn % 2, text)
        kvkeep.detach(model)
        assert store.stats().hits == (4 if kept and len(said) == 2 and _ == 1 else 2)


def test_a_prefix_is_told_by_a_hash_that_nobody_can_forge():
    """SHA-256, of the tokens as 64-bit integers: a fixed value, so that no weaker one slips in."""
    blocks = {len(block.tokens): block for block in blocks_of(TOKENS[:20])}
    identity, prefix, own = blocks[4].key.split("/")
    import hashlib

    def sha(tokens):
        data = b"".join(token.to_bytes(8, "little") for token in tokens)
        return hashlib.sha256(data).hexdigest()

    assert identity == hashlib.sha256(b"m").hexdigest()
    assert prefix == sha(TOKENS[:16])
    assert own == f"{16:08x}" + sha(TOKENS[16:20])


def test_tokens_before_a_block_that_hash_alike_once_are_told_apart():
    """Two texts whose first eight tokens have one XXH3: the second begins with what it is not."""
    one, two = torch.arange(16), torch.arange(16)
    two[3] = 77
    texts = Exchange(Entries(None), Memory(), 8)
    keys = [list(texts._places("m", tokens, 0)) for tokens in (one, two)]
    assert keys[0][0] != keys[1][0]
    assert keys[0][1] != keys[1][1]
    later = list(texts._places("m", one, 8))
    assert later == keys[0][1:]


def test_crafted_headers_of_blocks():
    """Numbers beyond all bounds, under a right seal, are refused before memory is taken."""
    (block,) = blocks_of(TOKENS[:8])
    data, key = block.to_bytes(), block.key
    size = 8 + int.from_bytes(data[:8], "little")
    outer, body = json.loads(data[8:size]), data[size:]
    inner = json.loads(outer["__metadata__"]["kvkeep_block"])

    def refused(header, text=None):
        text = json.dumps(header).encode() if text is None else text
        with pytest.raises(ValueError, match="not a kvkeep block"):
            StoredBlock.from_bytes(len(text).to_bytes(8, "little") + text + body, key)

    def with_inner(**changes):
        return outer | {"__metadata__": sealed("kvkeep_block", inner | changes)}

    k = outer["0.k"]
    refused(with_inner(likes=[[10**7, 4, 4, "torch.float32"]] * 2))
    refused(with_inner(likes=[[1, 4, 4, "torch.float32"]] * 10_000))
    refused(with_inner(likes=[[1, 2**70, 4, "torch.float32"]] * 2))
    refused(with_inner(routed=[]))
    refused(outer | {"0.k": k | {"shape": [1, 1, 8, 2**50]}})
    refused(outer | {"0.k": k | {"shape": [2**50] * 9}})
    refused(outer | {"0.k": k | {"data_offsets": [x + 4 for x in k["data_offsets"]]}})  # overlap
    refused(outer | {"0.k": outer["0.v"]})  # one tensor twice, and a hole
    refused(outer | {"0.k": k | {"data_offsets": [k["data_offsets"][0]] * 2, "shape": [0]}})
    refused(outer | {"more": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}})
    refused(None, b"[" * 400_000)
    refused(None, b'{"a":' * 80_000)
    refused(None, b"1" * 5000)
    refused(None, b" " * (1 << 20))
    with pytest.raises(ValueError, match="an intact block, but its key is"):
        StoredBlock.from_bytes(data, key[:-1] + ("0" if key[-1] != "0" else "1"))
    assert found_in(PrefixStore(backend=Memory()), [1]) == 0
