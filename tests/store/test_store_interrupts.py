"""An interrupt in a store leaves its counts, locks and files right, and the store works on."""

from __future__ import annotations

import gc
import os
import threading
from contextlib import suppress

import pytest
import torch
from support.interruption import Interruption
from support.store_places import blocks_of, put
from support.sweep_models import model_of
from support.token_caches import TOKEN_BYTES, fed, new_cache

import kvkeep
from kvkeep.store import Disk, Memory, PrefixStore

pytestmark = pytest.mark.usefixtures("one_thread")

BUDGET = 40 * TOKEN_BYTES
BLOCK = 12
KNOWN = [*range(20)]
FORKED = [*range(12), *range(50, 62)]
SIZE = len(blocks_of(KNOWN, block=BLOCK)[0].to_bytes())


def insert(store, tokens):
    return inserting(store, tokens)()


def inserting(store, tokens):
    """Inserts tokens into a store when it is called; their cache is made before."""
    cache = fed(tokens)
    return lambda: store.insert("m", torch.tensor(tokens), cache)


def looking_up(store):
    cache = new_cache()

    def look_up():
        with store.match("m", torch.tensor(FORKED)) as hit:
            hit.fill(cache)

    return look_up


def deleting(store):
    key = next(store.backend.scan())
    return lambda: store.backend.delete(key)


def in_memory(path):
    """A store that is nearly full: 20 + 10 tokens of 40."""
    store = PrefixStore(BUDGET)
    insert(store, [*range(100, 110)])
    insert(store, KNOWN)
    return store


def with_blocks(path):
    """A store whose backend holds more than itself."""
    store = PrefixStore(BUDGET, backend=Memory(), block=BLOCK)
    insert(store, FORKED)
    store.clear()
    insert(store, KNOWN)
    return store


def on_disk(path):
    """A store whose directory is full, with 2 + 1 blocks, and which holds nothing itself."""
    store = PrefixStore(BUDGET, backend=Disk(path, budget=3 * SIZE), block=BLOCK)
    insert(store, FORKED)
    insert(store, KNOWN)
    store.clear()
    return store


STORES = {
    "insert": (in_memory, lambda store: inserting(store, FORKED)),
    "look-up": (in_memory, looking_up),
    "clear": (in_memory, lambda store: store.clear),
    "insert-blocks": (with_blocks, lambda store: inserting(store, [*KNOWN, *FORKED])),
    "look-up-blocks": (with_blocks, looking_up),
    "insert-disk": (on_disk, lambda store: inserting(store, [*range(80, 92)])),
    "look-up-disk": (on_disk, looking_up),
    "delete-disk": (
        on_disk,
        lambda store: lambda: store.backend.delete(next(store.backend.scan())),
    ),
    "gc-disk": (on_disk, lambda store: lambda: store.backend.gc(0, budget=2 * SIZE)),
    "open-disk": (on_disk, lambda store: lambda: Disk(store.backend.path).nbytes),
}


def held(store):
    """Bytes of all tensors that a store holds."""
    contents = [node.content for node in store._entries.nodes()]
    tensors = [planes[name] for content in contents for planes in content.layers for name in planes]
    tensors += [x for content in contents for mark in content.marks.values() for x in mark.values()]
    return sum(x.numel() * x.element_size() for x in tensors)


def opened(path):
    """The names of the files below a directory that this process has open."""
    found = set()
    for handle in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # it was that of the list
            found.add(os.readlink(f"/proc/self/fd/{handle}"))
    return {name.removeprefix(f"{path}/") for name in found if name.startswith(f"{path}/")}


def require_free(lock):
    """Another thread can take a lock."""
    free = []

    def take():
        free.append(lock.acquire(blocking=False))
        if free[0]:
            lock.release()

    thread = threading.Thread(target=take)
    thread.start()
    thread.join()
    assert free == [True]


def require_right(store):
    store.check()
    assert store.nbytes == store.stats().nbytes == held(store) <= (store.budget or held(store))
    assert store.stats().locked == 0
    disk = store.backend
    if isinstance(disk, Disk):
        there = {file.name: file.stat().st_size for file in (disk.path / "blocks").iterdir()}
        for key in disk.scan():
            assert disk.get(key, used=False)
        assert disk.nbytes == sum(there.values()) <= (disk.budget or disk.nbytes)
        assert (disk.failures, disk.damaged) == (0, 0), disk.last_error


def interrupt_each(make, acting, after, tmp_path, every, within=""):
    """Interrupt an action on a new store at some of its lines, then look at the store; returns
    about how many lines it ran."""
    met, at = True, every // 2
    while met:
        path = tmp_path / f"{at}"
        store = make(path)
        act = acting(store)
        with Interruption(at, within) as interruption:
            act()
        met, lock = interruption.met, store._entries.lock
        if interruption.leaving:
            gc.collect()  # closes the file that `__exit__` would have closed
        else:
            require_free(lock)
        while lock._is_owned():
            lock.release()
        require_right(store)
        assert opened(path) == set()
        after(store)
        require_right(store)
        if isinstance(store.backend, Disk):
            assert [*(path / "new").iterdir()] == []
        at += every * met
    return at - every // 2


def works(store):
    store.clear()
    require_right(store)
    assert store.nbytes == 0
    assert insert(store, FORKED) == len(FORKED)
    with store.match("m", torch.tensor(FORKED)) as hit:
        assert hit.length == len(FORKED)
    if isinstance(store.backend, Disk):
        other = Disk(store.backend.path, store.backend.budget)
        assert put(other, KNOWN) == len(KNOWN)
        assert other.failures == 0, other.last_error


@pytest.mark.parametrize("every", [67, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("action", STORES)
def test_an_interrupt_of_a_store(action, tmp_path, every):
    # An interrupt was met; and each of the 60 lines of the shortest action, "delete-disk".
    assert interrupt_each(*STORES[action], works, tmp_path, every) > 50


def ids(n, seed=0):
    return torch.randint(2, 96, (n,), generator=torch.Generator().manual_seed(seed))


TEXT = torch.cat([ids(20), ids(5, 1)])


@torch.no_grad()
def learning(model, store):
    """Learns a text and its answer when it is called."""
    cache = store.find(model, TEXT[:20]).cache
    at = torch.arange(cache.fed, len(TEXT))[None]
    model(TEXT[None, cache.fed :], past_key_values=cache, position_ids=at)
    return lambda: store.learn(model, TEXT, cache)


@pytest.mark.parametrize(
    ("family", "within", "every"),
    [
        ("llama", "store/", 301),
        pytest.param("llama", "", 1, marks=pytest.mark.slow),
        pytest.param("lfm2", "store/", 1, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("action", ["learn", "find", "compress"])
def test_an_interrupt_of_a_store_of_a_model(family, action, within, every, tmp_path):
    if action == "compress" and family == "lfm2":
        pytest.skip("kvzip compresses no recurrent states")
    model = model_of(family)
    spec = "kvzip:40%" if action == "compress" else "keep_all"
    fork = torch.cat([ids(12), ids(6, 2)])

    def make(path):
        store = PrefixStore(backend=Disk(path), block=8)
        store.read(model, ids(20), spec="keep_all")
        return store

    def acting(store):
        if action == "learn":
            return learning(model, store)
        if action == "find":
            store.clear()
            return lambda: store.find(model, fork)
        return lambda: store.read(model, fork, spec=spec)

    def after(store):
        assert store.read(model, fork, spec=spec).cache.fed == len(fork)
        assert store.find(model, fork, spec=spec).found == len(fork)
        assert store.find(model, ids(20)).found > 0

    with kvkeep.attach(model):
        within = "store/" if action == "compress" else within
        assert interrupt_each(make, acting, after, tmp_path, every, within) > 100
