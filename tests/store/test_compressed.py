"""Compressed texts in stores: found whole, to the last bit, and by their own kind only."""

from __future__ import annotations

import pytest
import torch
from support.random_ids import row as ids
from support.tiny_models import tiny

import kvkeep
from kvkeep.errors import UnsupportedError
from kvkeep.geometry import Geometry
from kvkeep.host import host_of
from kvkeep.host.compress import read
from kvkeep.store import PrefixStore, open_store
from kvkeep.store.block import StoredBlock
from kvkeep.store.compressed import Compressed
from kvkeep.store.memory import Memory

SPEC = "kvzip:40%"
TAIL = "kvzip:40%,recent=2+int4:recent=3,sinks=1"
TEXT, MORE = 40, 9


def attached(family="llama", **options):
    model = tiny(family, max_position_embeddings=128, **options)
    kvkeep.attach(model)
    return model


@pytest.fixture
def model():
    return attached()


@torch.no_grad()
def logits(model, cache, *parts):
    """Of the last tokens of each part, fed one part after the other."""
    return [model(part[None], past_key_values=cache).logits for part in parts]


def directly(model, spec, text, *parts):
    """The logits after a text that was compressed without a store."""
    cache = kvkeep.Cache(model, spec)
    read(host_of(model), cache, text[None])
    return logits(model, cache, *parts)


def nothing_is_compressed(monkeypatch):
    monkeypatch.setattr("kvkeep.store.prefix.compress", None)


@pytest.mark.parametrize(
    ("spec", "dtype"),
    [
        *[(SPEC, torch.float32), (SPEC + "+int8", torch.bfloat16)],
        *[(SPEC + "+int8/int4", torch.float32), (TAIL, torch.bfloat16)],
    ],
)
@pytest.mark.parametrize("where", ["memory", "disk", "a store opened again"])
def test_a_text_is_compressed_once(model, spec, where, dtype, tmp_path, monkeypatch):
    model.to(dtype)
    text, more = ids(TEXT), ids(MORE, 4)
    parts = more.split([4, MORE - 4])
    expected = directly(model, spec, text, *parts)
    store = PrefixStore(backend=None if where == "memory" else open_store(str(tmp_path)))
    first = store.read(model, text, spec=spec)
    assert first.found == 0
    found = logits(model, first.cache, *parts)
    assert all(map(torch.equal, found, expected))
    if where == "a store opened again":
        store = PrefixStore(backend=open_store(str(tmp_path)))
    nothing_is_compressed(monkeypatch)
    for begun in (0, 1):
        again = store.read(model, torch.cat([text, *parts[:begun]]), spec=spec)
        assert again.found == TEXT
        found = logits(model, again.cache, *parts[begun:])
        assert all(map(torch.equal, found, expected[begun:]))
    assert store.stats().hits == 2
    assert store.stats().compressed_tokens == store.stats().tokens == TEXT
    store.check()


def test_every_kind_of_backend(model, place, monkeypatch):
    text, more = ids(TEXT), ids(MORE, 4)
    expected = directly(model, SPEC, text, more)
    PrefixStore(backend=place.open()).read(model, text, spec=SPEC)
    nothing_is_compressed(monkeypatch)
    for prompt in (text, torch.cat([text, ids(1, 7)])):
        found = PrefixStore(backend=place.open()).read(model, prompt, spec=SPEC)
        assert found.found == TEXT
    again = PrefixStore(backend=place.open()).read(model, text, spec=SPEC)
    assert logits(model, again.cache, more)[0].equal(expected[0])


def test_a_text_of_thousands_of_planes(tmp_path):
    """As many as a model of 80 layers with 16 heads has in 8 bits."""
    planes = {f"head.{i}.{name}": torch.zeros(1, 1, 1) for i in range(16) for name in "abcde"}
    given = [Geometry(1, 16, 4, 4, torch.float32)] * 80
    block = StoredBlock("a", "0" * 64, ids(3), Compressed([planes] * 80, 3), None, given)
    backend = open_store(str(tmp_path))
    assert backend.put(block)
    assert len(open_store(str(tmp_path)).get(block.key).content.layers) == 80
    (label,) = open_store(str(tmp_path)).labels([block.key])
    assert label.tokens.equal(ids(3))
    assert backend.damaged == backend.failures == 0


def test_the_longest_text_is_found(model, tmp_path):
    short, long = ids(20), torch.cat([ids(20), ids(20, 5)])
    for store in (PrefixStore(), PrefixStore(backend=open_store(str(tmp_path)))):
        for text in (short, long):
            cache = kvkeep.Cache(model, SPEC)
            read(host_of(model), cache, text[None])
            store._add_compressed(host_of(model), text, cache, "", 0)
        if store.backend is not None:
            store = PrefixStore(backend=store.backend)
        assert store.read(model, torch.cat([long, ids(3)]), spec=SPEC).found == 40
        assert store.read(model, torch.cat([short, ids(3)]), spec=SPEC).found == 20
        assert store.read(model, long[:30], spec=SPEC).found == 20
        assert store.read(model, long[:30], spec=SPEC, whole_text=True).found == 0
        begun = torch.cat([short, ids(21, 8)])  # most of it would stay uncompressed
        assert store.read(model, begun, spec=SPEC).found == 0


def test_only_the_same_compression_is_found(model):
    store, text = PrefixStore(), ids(TEXT)
    store.read(model, text, spec=SPEC)
    for other in ("kvzip:50%", "kvzip:40%,recent=2", "kvzip:40%,chunk=16", SPEC + "+int8"):
        assert store.read(model, text, spec=other).found == 0
        assert store.read(model, text, spec=other).found == TEXT
    whole = store.read(model, text, spec="keep_all")
    assert whole.found == 0
    assert all(layer.length == TEXT for layer in whole.cache.layers)
    assert store.read(model, text, spec=SPEC, namespace="other").found == 0
    assert store.read(model, text[:-1], spec=SPEC).found == 0  # no part of a compressed text
    assert store.read(attached(num_hidden_layers=1), text, spec=SPEC).found == 0
    store.check()


def test_bytes_and_budget(model):
    texts = [ids(TEXT, seed) for seed in range(3)]
    size = sum(
        planes[name].nbytes
        for layer in PrefixStore().read(model, texts[0], spec=SPEC).cache.layers
        for planes in layer.state().parts.values()
        for name in planes
    )
    store = PrefixStore(budget=2 * size)
    for text in texts:
        store.read(model, text, spec=SPEC)
    assert store.nbytes == 2 * size
    assert store.stats().compressed_entries == 2
    assert store.stats().evicted_bytes == size
    found = [store.read(model, text, spec=SPEC).found for text in texts[1:]]
    assert found == [TEXT, TEXT]  # the least recently used one was evicted
    store.read(model, texts[0], spec="keep_all")  # exact slots evict compressed texts too
    store.check()
    assert store.stats().compressed_entries < 2
    store.clear()
    assert (store.nbytes, store.stats().entries) == (0, 0)
    small = PrefixStore(budget=size - 1)
    assert small.read(model, texts[0], spec=SPEC).found == 0
    assert small.nbytes == 0
    small.check()


def test_windows_are_kept_as_they_are(tmp_path):
    model = attached("gemma3", sliding_window=12)
    text, more = ids(TEXT), ids(MORE, 4)
    expected = directly(model, SPEC, text, more)
    PrefixStore(backend=open_store(str(tmp_path))).read(model, text, spec=SPEC)
    found = PrefixStore(backend=open_store(str(tmp_path))).read(model, text, spec=SPEC)
    assert found.found == TEXT
    assert logits(model, found.cache, more)[0].equal(expected[0])


def test_many_texts_that_begin_alike(model, tmp_path):
    """As those do that a chat template puts the same instructions before."""
    alike, store = ids(20), PrefixStore(backend=open_store(str(tmp_path)))
    texts = [torch.cat([alike, ids(20, seed)]) for seed in range(20)]
    for text in texts:
        store.read(model, text, spec=SPEC)
    for text in texts:
        store = PrefixStore(backend=store.backend)
        assert store.read(model, torch.cat([text, ids(3)]), spec=SPEC).found == TEXT


def test_windows_of_foreign_positions(tmp_path):
    model, backend, text = attached("gemma3", sliding_window=12), Memory(), ids(TEXT)
    PrefixStore(backend=backend).read(model, text, spec=SPEC)
    (block,) = backend._blocks.values()
    windowed = next(x for x in block.content.layers if "slots.position" in x)
    windowed["slots.position"] -= 1
    assert PrefixStore(backend=backend).read(model, text, spec=SPEC).found == 0
    assert backend.damaged == 1


def test_a_model_of_windows_alone_compresses_nothing():
    model, text = attached("mistral", sliding_window=12), ids(TEXT)[None]
    wanted = model.generate(text, max_new_tokens=4, do_sample=False, pad_token_id=0)
    for store in (None, PrefixStore()):
        kvkeep.detach(model)
        kvkeep.attach(model, SPEC, store=store)
        assert model.generate(text, max_new_tokens=4, do_sample=False, pad_token_id=0).equal(wanted)


def test_generate_counts_no_refusal_and_learns_nothing(model):
    store = PrefixStore()
    kvkeep.detach(model)
    kvkeep.attach(model, SPEC, store=store)
    model.generate(ids(TEXT)[None], max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert store.stats().refused == 0
    assert store.stats().tokens == store.stats().compressed_tokens == TEXT - 1


def changed(block, what):
    layers = [dict(layer) for layer in block.content.layers]
    first = layers[0]
    if what == "a head is missing":
        for name in [name for name in first if name.startswith("head.1.")]:
            del first[name]
    if what == "a head is empty":
        for name in ("head.0.k", "head.0.v", "head.0.position"):
            first[name] = first[name][:, :, :0]
    if what == "a token twice":
        first["head.0.position"] = first["head.0.position"].clone()
        first["head.0.position"][..., 1] = first["head.0.position"][..., 0]
    if what == "a position behind the text":
        first["head.0.position"] = first["head.0.position"] + TEXT
    if what == "a token in both parts":
        own = first["slots.position"] = first["slots.position"].clone()
        own[0, 1, -1] = first["head.1.position"][0, 0, 0]
    if what == "a tail of one head":
        first["slots.k"] = first["slots.k"][:, :1]
    if what == "an encoded tail":
        first["slots.k"] = first["slots.k"].to(torch.uint8)
    if what == "a part of no head":
        first["more.position"] = first["slots.position"]
    if what == "narrow keys":
        first["head.0.k"] = first["head.0.k"][..., :2]
    if what == "another dtype":
        first["head.0.v"] = first["head.0.v"].half()
    if what == "a layer is missing":
        layers = layers[:1]
    content = Compressed(layers, TEXT)
    given = block.geometries[: len(layers)]
    return StoredBlock(block.identity, block.prefix, block.tokens, content, block.routed, given)


@pytest.mark.parametrize(
    "what",
    [
        "nothing",
        "a head is missing",
        "a head is empty",
        "a token twice",
        "a position behind the text",
        "narrow keys",
        "another dtype",
        "a layer is missing",
    ],
)
def test_what_does_not_fit_the_model_is_put_aside(model, what):
    require_put_aside(model, SPEC, what)


def require_put_aside(model, spec, what):
    """A stored text is found again, unless it was changed."""
    backend, text = Memory(), ids(TEXT)
    PrefixStore(backend=backend).read(model, text, spec=spec)
    (key,) = backend.scan()
    backend._blocks[key] = changed(backend._blocks[key], what)
    found = PrefixStore(backend=backend).read(model, text, spec=spec).found
    assert found == (TEXT if what == "nothing" else 0)
    assert backend.damaged == (what != "nothing")


@pytest.mark.parametrize(
    "what",
    [
        *("nothing", "a head is missing", "a token twice", "a position behind the text"),
        *("a token in both parts", "a tail of one head", "an encoded tail", "a part of no head"),
    ],
)
def test_a_plain_tail_that_does_not_fit_is_put_aside(model, what):
    require_put_aside(model, TAIL, what)


def test_bytes_are_read_again_as_they_were_written(model):
    backend = Memory()
    PrefixStore(backend=backend).read(model, ids(TEXT), spec=SPEC)
    ((key, block),) = backend._blocks.items()
    data = block.to_bytes()
    again = StoredBlock.from_bytes(data, key)
    assert isinstance(again.content, Compressed)
    assert again.content.layers[1]["head.1.k"].equal(block.content.layers[1]["head.1.k"])
    for at in range(0, len(data), 97):
        bad = bytearray(data)
        bad[at] ^= 1
        with pytest.raises(ValueError, match=r"block|check|bytes|header|key"):
            StoredBlock.from_bytes(bad, key)


def test_generate_finds_it(monkeypatch):
    model, store = attached(), PrefixStore()
    kvkeep.detach(model)
    kvkeep.attach(model, SPEC, store=store)
    greedy = {"max_new_tokens": 6, "do_sample": False}
    first = model.generate(ids(TEXT)[None], **greedy)
    nothing_is_compressed(monkeypatch)
    assert model.generate(ids(TEXT)[None], **greedy).equal(first)
    assert store.stats().hit_tokens == TEXT - 1
    assert store.stats().refused == 0


def test_an_activated_adapter_is_refused(model, monkeypatch):
    class Activated:
        start, adapter = 5, "0"

    monkeypatch.setattr(type(host_of(model)), "activation_in", lambda *args: Activated())
    with pytest.raises(UnsupportedError, match="use keep_all"):
        PrefixStore().read(model, ids(TEXT), spec=SPEC)
