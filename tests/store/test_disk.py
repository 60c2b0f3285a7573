"""Blocks on disk: found by other processes, and whole or not found."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time

import pytest
import torch
from kept import TOKEN_BYTES, fed, holds, longest, new_cache

from kvkeep.errors import SpecError
from kvkeep.store import Block, Disk, Memory, PrefixStore
from kvkeep.store.backend import digest


def put(store, tokens):
    return store.insert("m", torch.tensor(tokens), fed(tokens))


def found(store, tokens, identity="m"):
    """How many tokens are found, after seeing that their slots are right."""
    cache = new_cache()
    with store.match(identity, torch.tensor(tokens)) as hit:
        hit.fill(cache)
        assert holds(cache, tokens[: hit.length])
    store.check()
    return hit.length


def files(disk, part="blocks"):
    return sorted((disk.path / part).iterdir())


@pytest.fixture(params=["memory", "disk"])
def backend(request, tmp_path):
    return Memory() if request.param == "memory" else Disk(tmp_path / "store")


def test_another_store_finds_every_token(backend):
    tokens = list(range(30))
    put(PrefixStore(backend=backend, block=8), tokens)
    for other, known in (
        (tokens, 30),
        ([*tokens, 5, 6], 30),
        ([*tokens[:27], 99], 27),
        ([*tokens[:16], 99], 16),
        ([*tokens[:3], 99], 3),
        ([99], 0),
    ):
        assert found(PrefixStore(backend=backend, block=8), other) == known
    assert found(PrefixStore(backend=backend, block=8), tokens, identity="n") == 0


def test_shared_blocks_are_written_once(tmp_path):
    disk = Disk(tmp_path / "store")
    for end in range(4):
        put(PrefixStore(backend=disk, block=8), [*range(16), 90 + end])
    assert len(files(disk)) == 2 + 4
    assert len(list(disk.scan())) == 6


@pytest.mark.parametrize("seed", range(2))
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
            put(store, tokens)
            entries.append(tokens)
        else:
            known = longest(entries[1:], tokens)
            assert known - known % 4 <= found(store, tokens) <= known


def test_damage_is_a_miss(tmp_path):
    tokens = list(range(20))
    draw = random.Random(3)
    for _ in range(40):
        disk = Disk(tmp_path / "store")
        put(PrefixStore(backend=disk, block=8), tokens)
        file = draw.choice(files(disk))
        data = bytearray(file.read_bytes())
        place = draw.randrange(len(data))
        if draw.random() < 0.2:
            data = data[:place]
        else:
            data[place] ^= 1 << draw.randrange(8)
        file.write_bytes(data)
        length = found(PrefixStore(backend=disk, block=8), tokens)
        if length < 20:
            assert not file.exists()
            assert len(files(disk, "quarantine")) == 1
            assert put(PrefixStore(backend=disk, block=8), tokens) == 20
        assert found(PrefixStore(backend=disk, block=8), tokens) == 20
        disk.gc(older_than=0)
        assert not files(disk, "quarantine")


def test_a_missing_file_is_a_miss(tmp_path):
    disk = Disk(tmp_path / "store")
    put(PrefixStore(backend=disk, block=8), list(range(20)))
    for file in files(disk)[:1]:
        file.unlink()
    assert found(PrefixStore(backend=disk, block=8), list(range(20))) < 20
    assert len(list(disk.scan())) < 3


def test_other_texts_under_the_same_key_are_never_used():
    """A hash says where to look, not what it is."""
    memory = Memory()
    tokens = list(range(16))
    put(PrefixStore(backend=memory, block=8), tokens)
    (key, block), *_ = memory._blocks.items()
    other = Block(
        block.identity, block.prefix, block.tokens + 1, block.stretch, block.routed, block.likes
    )
    memory._blocks[key] = other
    length = found(PrefixStore(backend=memory, block=8), tokens)
    assert length == (0 if block.prefix == digest(torch.tensor([], dtype=torch.int64)) else 8)


def test_budget(tmp_path):
    probe = Disk(tmp_path / "probe")
    put(PrefixStore(backend=probe, block=8), list(range(8)))
    size = probe.nbytes
    assert size == sum(file.stat().st_size for file in files(probe))
    disk = Disk(tmp_path / "store", budget=3 * size)
    texts = [list(range(first, first + 8)) for first in (0, 100, 200, 300)]
    for tokens in texts[:3]:
        put(PrefixStore(backend=disk, block=8), tokens)
        time.sleep(0.01)
    assert found(PrefixStore(backend=disk, block=8), texts[0]) == 8
    put(PrefixStore(backend=disk, block=8), texts[3])
    lengths = [found(PrefixStore(backend=disk, block=8), tokens) for tokens in texts]
    assert lengths == [8, 0, 8, 8]
    assert disk.nbytes <= 3 * size
    assert len(files(disk)) == 3
    small = Disk(tmp_path / "small", budget=size // 2)
    put(PrefixStore(backend=small, block=8), texts[0])
    assert (small.nbytes, files(small)) == (0, [])


def test_bad_input(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(SpecError, match="no directory"):
        Disk(tmp_path / "file")
    with pytest.raises(SpecError, match="at least 1"):
        Disk(tmp_path / "a", budget=0)
    with pytest.raises(SpecError, match="blocks of 0"):
        PrefixStore(block=0)


def _work(path, seed, seconds, budget, failures):
    """Store and find texts, and see that what is found is right."""
    try:
        torch.set_num_threads(1)
        draw = random.Random(seed)
        disk = Disk(path, budget=budget)
        end = time.time() + seconds
        while time.time() < end:
            texts = random.Random(draw.randrange(12))
            tokens = [texts.randrange(50) for _ in range(texts.randrange(4, 40))]
            store = PrefixStore(backend=disk, block=8)
            length = found(store, tokens)
            if length < len(tokens):
                put(store, tokens)
    except BaseException as error:
        failures.put(f"{seed}: {error!r}")
        raise


def _storm(path, processes, seconds, budget):
    """Processes over one store, of which one is killed and replaced now and then."""
    context = multiprocessing.get_context("fork")  # quick to start
    failures, seeds = context.Queue(), iter(range(100_000))

    def start():
        process = context.Process(
            target=_work, args=(path, next(seeds), seconds + 60, budget, failures), daemon=True
        )
        process.start()
        return process

    alive, killed = [start() for _ in range(processes)], 0
    end = time.time() + seconds
    while time.time() < end:
        time.sleep(random.random() * seconds / 10)
        victim = alive.pop(random.randrange(len(alive)))
        os.kill(victim.pid, signal.SIGKILL)
        victim.join()
        killed += 1
        alive.append(start())
    for process in alive:
        process.kill()
        process.join()
    assert failures.empty(), failures.get()
    assert killed > 3
    disk = Disk(path)
    assert disk.nbytes <= budget
    assert not files(disk, "quarantine")
    for key in disk.scan():
        assert disk.get(key) is not None
    named = len(list(disk.scan()))
    assert named > 0
    disk.gc(older_than=0)
    assert len(files(disk)) == named
    assert not files(disk, "new") or all("partial" in file.name for file in files(disk, "new"))


def test_killed_processes(tmp_path):
    _storm(tmp_path / "store", processes=4, seconds=10, budget=60_000)


@pytest.mark.slow
def test_sixteen_processes_for_a_minute(tmp_path):
    _storm(tmp_path / "store", processes=16, seconds=60, budget=60_000)
