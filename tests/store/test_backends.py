"""What all backends do: blocks are found by others, and whole or not found."""

from __future__ import annotations

import copy
import json
import multiprocessing
import os
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import xxhash
from support.slow import every
from support.store_places import Place, blocks_of, damaged, found, found_in, put, text
from support.tiny_models import tiny
from support.token_caches import TOKEN_BYTES, fed, longest

from kvkeep.errors import SpecError
from kvkeep.files.headers import sealed
from kvkeep.store import Label, Memory, PrefixStore, StoredBlock

TOKENS = list(range(30))


def test_another_store_finds_every_token(backend):
    put(backend, TOKENS)
    for other, known in (
        (TOKENS, 30),
        ([*TOKENS, 5, 6], 30),
        ([*TOKENS[:27], 99], 27),
        ([*TOKENS[:16], 99], 16),
        ([*TOKENS[:3], 99], 3),
        ([99], 0),
    ):
        assert found(backend, other) == known
    assert found(backend, TOKENS, identity="n") == 0
    assert (backend.failures, backend.damaged) == (0, 0)


def test_the_longest_of_blocks_that_begin_alike(backend):
    for end in range(1, 7):
        put(backend, [*range(1, end + 1), 90 + end])
    assert found(backend, [1, 2, 3, 4, 5, 6, 50]) == 6


def test_shared_blocks_are_written_once(backend):
    for end in range(4):
        put(backend, [*range(16), 90 + end])
    assert len(list(backend.scan())) == 2 + 4


@pytest.mark.parametrize("seed", every(2, range(2)))
def test_random_workloads(backend, seed):
    draw = random.Random(seed)
    entries = [[0]]
    store = PrefixStore(40 * TOKEN_BYTES, backend=backend, block=4)
    for _ in range(60):
        beginning = draw.choice(entries)
        tokens = beginning[: draw.randrange(len(beginning) + 1)]
        tokens += [draw.randrange(3) for _ in range(draw.randrange(1, 9))]
        tokens = tokens[:30]
        if draw.random() < 0.2:
            store = PrefixStore(40 * TOKEN_BYTES, backend=backend, block=4)
        if draw.random() < 0.5:
            store.insert("m", torch.tensor(tokens), fed(tokens))
            entries.append(tokens)
        else:
            known = longest(entries[1:], tokens)
            assert known - known % 4 <= found_in(store, tokens) <= known


def test_calls(backend):
    """Each call by itself, on the blocks of one text."""
    blocks = blocks_of(TOKENS)
    keys = [block.key for block in blocks]
    assert backend.missing(keys) == keys
    assert backend.leading(keys) == []
    assert backend.labels(keys) == [None] * 4
    backend.delete(keys[0])

    assert backend.put(blocks[0])
    assert backend.put_all(blocks[:3]) == 3
    assert backend.missing(keys) == keys[3:]
    assert [block.key for block in backend.leading(keys)] == keys[:3]
    assert backend.leading(keys[3:]) == []
    assert sorted(backend.scan()) == sorted(keys[:3])
    assert list(backend.scan(keys[1][:70])) == [keys[1]]
    assert list(backend.scan("../")) == []
    assert backend.exists()

    got = backend.get(keys[1], used=False)
    assert {n: x.tolist() for n, x in got.tensors().items()} == {
        n: x.tolist() for n, x in blocks[1].tensors().items()
    }
    label = backend.labels([keys[1], keys[3]])[0]
    assert (label.identity, label.layers, label.dtype) == ("m", 2, "torch.float32")
    assert label.tokens.tolist() == TOKENS[8:16]

    backend.delete(keys[0])
    assert not backend.contains(keys[0])
    assert backend.contains(keys[1])
    assert backend.leading(keys) == []
    assert backend.put_all(blocks) == 4


def test_keys_that_are_no_blocks(backend):
    for key in ("", "..", "../../etc/passwd", "a//b", "a/b/c/d", "ä", "*", "x" * 5000):
        assert backend.get(key) is None
        assert not backend.contains(key)
        backend.delete(key)
    assert list(backend.scan()) == []


def test_many_keys(place):
    """More than one round trip can transfer."""
    backend, blocks = place.open(), blocks_of(list(range(300)), block=1)
    assert backend.put_all(blocks) == 300
    keys = [block.key for block in blocks]
    assert sorted(backend.scan()) == sorted(keys)
    assert [label.tokens.item() for label in backend.labels(keys)] == list(range(300))
    assert backend.missing([*keys, "a/b/c"]) == ["a/b/c"]
    assert len(backend.leading(keys)) == 300


def test_other_weights_are_never_used(place):
    """Models that differ in one weight, or tenants, have entries of their own in one place."""
    model, prompt = tiny("llama"), torch.arange(2, 40)
    sibling = copy.deepcopy(model)
    with torch.no_grad():
        sibling.model.layers[1].mlp.up_proj.weight[0, 0] += 0.01

    def hits(model, namespace=""):
        store = PrefixStore(backend=place.open(), block=16)
        store.prefill(model, prompt, namespace=namespace)
        return store.stats().hit_tokens

    assert [hits(model), hits(model)] == [0, 37]
    assert [hits(sibling), hits(sibling)] == [0, 37]
    assert [hits(model, "tenant"), hits(model, "tenant")] == [0, 37]
    backend = place.open()
    assert len({label.identity for label in backend.labels(list(backend.scan()))}) == 3


def test_damage_is_a_miss(place):
    tokens, draw = TOKENS[:20], random.Random(3)
    for _ in range(20):
        backend = place.open()
        put(backend, tokens)
        name = draw.choice(place.blocks())
        place.write(name, damaged(place.read(name), draw))
        length = found(backend, tokens)
        assert length < 20
        assert backend.damaged == 1
        assert place.set_aside() == 1
        assert name not in place.blocks()
        assert put(backend, tokens) == 20
        assert found(backend, tokens) == 20
        assert backend.gc(older_than=3600) == 0
        assert place.set_aside() == 1
        assert backend.gc(older_than=0) > 0
        assert place.set_aside() == 0
        assert len(place.blocks()) == 3


@pytest.mark.parametrize(
    "foreign", [b"", b"hello", b"PK\x03\x04" + bytes(50), b"\x80\x04K\x01.", bytes(8), b"\xff" * 99]
)
def test_foreign_bytes_are_a_miss(place, foreign):
    backend = place.open()
    put(backend, TOKENS)
    for name in place.blocks():
        place.write(name, foreign)
    for key in backend.scan():
        assert backend.labels([key]) == [None]
        assert backend.get(key) is None
    assert found(backend, TOKENS) == 0
    assert put(place.open(), TOKENS) == 30
    assert found(place.open(), TOKENS) == 30


def test_another_keys_block_is_a_miss(place):
    """A hash says where to look, not what it is."""
    backend = place.open()
    put(backend, TOKENS[:16])
    first, second = place.blocks()
    swapped = place.read(first), place.read(second)
    place.write(second, swapped[0])
    place.write(first, swapped[1])
    assert found(backend, TOKENS[:16]) == 0
    assert backend.damaged > 0


def test_a_block_that_is_gone_is_a_miss(place):
    backend = place.open()
    put(backend, TOKENS[:20])
    place.remove(place.blocks()[0])
    assert found(backend, TOKENS[:20]) < 20
    assert put(backend, TOKENS[:20]) == 20
    assert found(place.open(), TOKENS[:20]) == 20
    assert len(list(backend.scan())) == 3


def test_other_texts_under_the_same_key_are_never_used():
    memory = Memory()
    put(memory, TOKENS[:16])
    (key, block), *_ = memory._blocks.items()
    memory._blocks[key] = StoredBlock(
        block.identity,
        block.prefix,
        block.tokens + 1,
        block.content,
        block.routed,
        block.geometries,
    )
    assert found(memory, TOKENS[:16]) == 0


ABSURD = [None, True, -1, 0, 1.5, 2**63, "x", [], {}, [[]], [1, 2], {"a": 1}, [2**62, 2**62]]


def _changed(header):
    """A header with each of its parts replaced by each absurd one."""
    parts = list(header.items()) if isinstance(header, dict) else list(enumerate(header))
    for name, part in parts:
        for absurd in [*ABSURD, "[" * 5000]:
            other = copy.copy(header)
            other[name] = absurd
            yield other
        if isinstance(part, (dict, list)):
            for inner in _changed(part):
                other = copy.copy(header)
                other[name] = inner
                yield other


def _rebuilt(header, body):
    start = json.dumps(header).encode()
    return len(start).to_bytes(8, "little") + start + body


def test_a_label_says_the_bytes_that_are_stored():
    (block,) = blocks_of(TOKENS[:8])
    data = block.to_bytes()
    assert Label.of(block).nbytes == Label.read(data, block.key).nbytes == len(data)


def test_absurd_headers():
    """Also under a right seal: what cannot be a block raises ValueError, and nothing else."""
    (block,) = blocks_of(TOKENS[:8])
    key, data = block.key, block.to_bytes()
    assert StoredBlock.from_bytes(data, key).tokens.equal(block.tokens)
    assert Label.read(data, key).nbytes == len(data)
    size = 8 + int.from_bytes(data[:8], "little")
    outer, body = json.loads(data[8:size]), data[size:]
    inner = json.loads(outer["__metadata__"]["kvkeep_block"])
    versions = [_rebuilt(header, body) for header in _changed(outer)]
    for header in _changed(inner):
        versions.append(_rebuilt(outer | {"__metadata__": sealed("kvkeep_block", header)}, body))
    seal = xxhash.xxh3_128_hexdigest(b"[" * 100_000)
    deep = {"kvkeep_block": "[" * 100_000, "kvkeep_checksum": seal}
    versions.append(_rebuilt(outer | {"__metadata__": deep}, body))
    refused = 0
    for version in versions:
        for read in (StoredBlock.from_bytes, Label.read):
            try:
                read(version, key)
            except ValueError:
                refused += 1
    assert len(versions) > 500
    assert refused > len(versions)


def test_blocks_of_another_shape_are_not_joined():
    """Who may write can seal what is no model's; it is no error of whoever asks."""
    first, second = blocks_of(TOKENS[:16])
    narrow = [{n: x[..., :2] for n, x in planes.items()} for planes in second.content.layers]
    stretch = type(second.content)(narrow, 8)
    other = StoredBlock(
        "m", second.prefix, second.tokens, stretch, second.routed, second.geometries
    )
    memory = Memory()
    memory.put_all([first, other])
    assert found(memory, TOKENS[:16]) == 8


def test_budget(place_with_budget):
    place = place_with_budget
    put(place.open(), TOKENS[:8])
    size = place.open().nbytes
    assert size == len(place.read(place.blocks()[0]))
    place.clear()
    backend = place.open(3 * size)
    texts = [list(range(first, first + 8)) for first in (0, 100, 200, 300)]
    for tokens in texts[:3]:
        put(backend, tokens)
        time.sleep(0.01)
    assert found(backend, texts[0]) == 8
    put(backend, texts[3])
    lengths = [found(backend, tokens) for tokens in texts]
    knows_use = not place.kind.startswith("location")
    assert lengths == ([8, 0, 8, 8] if knows_use else [0, 8, 8, 8])
    assert backend.nbytes == 3 * size
    assert len(place.blocks()) == 3
    assert backend.gc(budget=size) == 2 * size
    assert backend.nbytes == size
    place.clear()
    small = place.open(size // 2)
    put(small, texts[0])
    assert (small.nbytes, place.blocks()) == (0, [])
    assert not small.put(blocks_of(texts[0])[0])


def test_looking_is_not_using(place_with_budget):
    place = place_with_budget
    blocks = blocks_of(*([first] * 8 for first in range(4)))
    size = len(blocks[0].to_bytes())
    backend = place.open(3 * size)
    for block in blocks[:3]:
        backend.put(block)
        time.sleep(0.01)
    assert backend.get(blocks[0].key, used=False) is not None
    backend.labels([blocks[0].key])
    backend.put(blocks[3])
    assert [backend.contains(block.key) for block in blocks] == [False, True, True, True]


def test_no_budget(place_with_budget):
    with pytest.raises(SpecError, match="at least 1"):
        place_with_budget.open(0)
    with pytest.raises(SpecError, match="at least 1"):
        place_with_budget.open().gc(budget=0)


def test_threads(place):
    """Of one backend, and of one key at once."""
    backend, errors = place.open(), []
    start = threading.Barrier(6)

    def work(seed):
        try:
            draw = random.Random(seed)
            start.wait()
            put(backend, TOKENS)
            for _ in range(4):
                tokens = text(draw)
                put(backend, tokens)
                assert found(backend, tokens) == len(tokens)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    assert backend.failures == 0
    assert found(backend, TOKENS) == 30
    keys = list(backend.scan())
    assert len(keys) == len(set(keys)) == len(place.blocks())


def _work(place, seed, seconds, budget, failures, hits):
    """Store and find texts, and see that what is found is right."""
    try:
        torch.set_num_threads(1)
        draw = random.Random(seed)
        backend = place.open(budget)
        end = time.time() + seconds
        while time.time() < end:
            tokens = text(draw)
            store = PrefixStore(backend=backend, block=8)
            length = found_in(store, tokens)
            hits.value += length > 0  # a few are lost, for nobody waits for a lock
            if length < len(tokens):
                store.insert("m", torch.tensor(tokens), fed(tokens))
    except BaseException as error:
        failures.put(f"{seed}: {error!r}")
        raise


def _storm(place, processes, seconds, budget):
    """Processes over one place, of which one is killed and replaced now and then."""
    context = multiprocessing.get_context("fork")  # quick to start
    failures, seeds = context.Queue(), iter(range(100_000))
    hits = context.Value("q", 0, lock=False)

    def start():
        args = (place, next(seeds), seconds + 60, budget, failures, hits)
        process = context.Process(target=_work, args=args, daemon=True)
        process.start()
        return process

    alive, killed = [start() for _ in range(processes)], 0
    end = time.time() + seconds
    # A slow machine gets more time, as long as little has happened.
    while time.time() < end or (time.time() < end + 60 and (killed < 4 or hits.value <= 20)):
        time.sleep(random.random() * seconds / 10)
        victim = alive.pop(random.randrange(len(alive)))
        os.kill(victim.pid, signal.SIGKILL)
        victim.join()
        killed += 1
        alive.append(start())
        if budget is not None:
            backend = place.open()
            with backend._folder.lock():  # while nobody puts, so that all files are of one moment
                assert backend.nbytes <= budget
    for process in alive:
        process.kill()
        process.join()
    assert failures.empty(), failures.get()
    assert killed > 3
    assert hits.value > 20
    backend = place.open()
    assert place.set_aside() == 0
    keys = list(backend.scan())
    assert len(keys) > 3
    assert all(backend.get(key) is not None for key in keys)
    backend.gc(older_than=0)
    names = place.blocks()
    assert len(names) == len(keys)
    if budget is not None:
        assert backend.nbytes == sum(len(place.read(name)) for name in names) <= budget
    print(f"{killed} killed, {hits.value} hits, {backend.nbytes} bytes of {budget}")  # noqa: T201


@pytest.mark.parametrize(
    ("kind", "budget"),
    [("disk", 60_000), pytest.param("redis", None, marks=pytest.mark.slow)],
)
def test_killed_processes(kind, budget, tmp_path):
    place = Place(kind, tmp_path)
    try:
        _storm(place, processes=4, seconds=1, budget=budget)
    finally:
        place.close()


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "budget"), [("disk", 60_000), ("redis", None)])
def test_sixteen_processes_for_a_minute(kind, budget, tmp_path):
    place = Place(kind, tmp_path)
    try:
        _storm(place, processes=16, seconds=60, budget=budget)
    finally:
        place.close()


def test_while_a_backend_is_asked_other_threads_go_on():
    asked, answer = threading.Event(), threading.Event()

    class Slow(Memory):
        def get(self, key, *, used=True):
            asked.set()
            assert answer.wait(60)
            return super().get(key, used=used)

    store = PrefixStore(backend=Slow(), block=8)
    tokens = list(range(20))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(found_in, store, tokens)
        assert asked.wait(60)
        store.insert("m", torch.tensor(tokens), fed(tokens))
        assert store.stats().tokens == 20
        assert not waiting.done()
        answer.set()
        assert waiting.result() == 20
    store.check()
