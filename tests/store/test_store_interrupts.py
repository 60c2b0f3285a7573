"""An interrupt in a store leaves its counts, locks and files right, and the store works on."""

from __future__ import annotations

import os
import threading
from contextlib import suppress

import pytest
import torch
from support.interruption import Interruption
from support.store_places import blocks_of, put
from support.token_caches import TOKEN_BYTES, fed, new_cache

from kvkeep.store import Disk, Memory, PrefixStore

pytestmark = pytest.mark.usefixtures("one_thread")

BUDGET = 40 * TOKEN_BYTES
KNOWN = [*range(20)]
FORKED = [*range(12), *range(50, 62)]
SIZE = len(blocks_of(KNOWN[:8])[0].to_bytes())


def insert(store, tokens):
    return store.insert("m", torch.tensor(tokens), fed(tokens))


def in_memory(path):
    """A store that is nearly full: 20 + 10 tokens of 40."""
    store = PrefixStore(BUDGET)
    insert(store, [*range(100, 110)])
    insert(store, KNOWN)
    return store


def with_blocks(path):
    store = PrefixStore(BUDGET, backend=Memory(), block=8)
    insert(store, FORKED)
    store.clear()
    insert(store, KNOWN)
    return store


def on_disk(path):
    """A store whose directory is nearly full, too."""
    store = PrefixStore(BUDGET, backend=Disk(path, budget=5 * SIZE), block=8)
    insert(store, FORKED)
    store.clear()
    return store


def look_up(store):
    with store.match("m", torch.tensor(FORKED)) as hit:
        hit.fill(new_cache())


STORES = {
    "insert": (in_memory, lambda store: insert(store, FORKED)),
    "look-up": (in_memory, look_up),
    "clear": (in_memory, lambda store: store.clear()),
    "insert-blocks": (with_blocks, lambda store: insert(store, [*KNOWN, *FORKED])),
    "look-up-blocks": (with_blocks, look_up),
    "insert-disk": (on_disk, lambda store: insert(store, [*KNOWN, *FORKED])),
    "look-up-disk": (on_disk, look_up),
    "delete-disk": (on_disk, lambda store: [*map(store.backend.delete, store.backend.scan())]),
    "gc-disk": (on_disk, lambda store: store.backend.gc(0, budget=2 * SIZE)),
    "open-disk": (on_disk, lambda store: put(Disk(store.backend.path), KNOWN)),
}


def held(store):
    """Bytes of all tensors that a store holds."""
    contents = [node.content for node in store._entries.nodes()]
    contents += [text.content for text in store._entries.texts()]
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
            disk.get(key, used=False)  # forgets a block whose file is gone
        assert disk.nbytes == sum(there.values()) <= (disk.budget or disk.nbytes)
        assert (disk.failures, disk.damaged) == (0, 0), disk.last_error
        assert not disk._index._connection().in_transaction


def interrupt_each(make, act, after, tmp_path, every, within=""):
    """Interrupt an action on a new store at some of its lines, then look at the store."""
    met, at = True, every // 2
    while met:
        path = tmp_path / f"{at}"
        store = make(path)
        require_right(store)
        with Interruption(at, within) as interruption:
            act(store)
        met, lock = interruption.met, store._entries.lock
        if not interruption.leaving:
            require_free(lock)
        while lock._is_owned():
            lock.release()
        require_right(store)
        assert opened(path) <= {"index.sqlite", "index.sqlite-wal", "index.sqlite-shm"}
        after(store)
        require_right(store)
        if isinstance(store.backend, Disk):
            assert [*(path / "new").iterdir()] == []
        at += every
    return at


def works(store):
    store.clear()
    require_right(store)
    assert store.nbytes == 0
    assert insert(store, FORKED) == len(FORKED)
    with store.match("m", torch.tensor(FORKED)) as hit:
        assert hit.length == len(FORKED)
    if store.backend is not None:
        assert put(store.backend, FORKED) == len(FORKED)


@pytest.mark.parametrize("every", [23, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("action", STORES)
def test_an_interrupt_of_a_store(action, tmp_path, every):
    make, act = STORES[action]
    assert interrupt_each(make, act, works, tmp_path, every) > 30
