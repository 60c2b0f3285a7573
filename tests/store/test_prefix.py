"""The prefix store: what brute force finds, under eviction; and never another text's slots."""

from __future__ import annotations

import random
import threading

import pytest
import torch
from support.token_caches import LAYERS, TOKEN_BYTES, fed, holds, longest, new_cache

from kvkeep.cache import Cache
from kvkeep.errors import KVKeepError, ShapeError, SpecError, StateError, UnsupportedError
from kvkeep.spec import CacheSpec
from kvkeep.store import PrefixStore


@pytest.mark.parametrize(
    ("seed", "operations"), [(0, 500), pytest.param(1, 10_000, marks=pytest.mark.slow)]
)
def test_random_workloads(seed, operations):
    """Texts that share beginnings, a budget for a part of them, locks."""
    draw = random.Random(seed)
    store = PrefixStore(budget=60 * TOKEN_BYTES)
    texts, locked = [[0]], []

    def text():
        beginning = draw.choice(texts)
        cut = draw.randrange(len(beginning) + 1)
        found = beginning[:cut] + [draw.randrange(3) for _ in range(draw.randrange(1, 9))]
        texts.append(found[:40])
        del texts[: len(texts) - 12]
        return texts[-1]

    for _ in range(operations):
        tokens, identity = text(), draw.choice("ab")
        entries = [entry.tolist() for entry in store.prefixes(identity)]
        known = longest(entries, tokens)
        action = draw.random()
        if action < 0.45:
            kept = store.insert(identity, torch.tensor(tokens), fed(tokens))
            assert known <= kept <= len(tokens)
            assert kept == len(tokens) or locked or store.nbytes == store.budget
            assert longest([e.tolist() for e in store.prefixes(identity)], tokens) == kept
        elif action < 0.9 or not locked:
            hit = store.match(identity, torch.tensor(tokens))
            assert hit.length == known
            cache = new_cache()
            hit.fill(cache)
            assert holds(cache, tokens[:known])
            if draw.random() < 0.2 and len(locked) < 3:
                locked.append((identity, tokens[:known], hit, cache))
            else:
                hit.release()
        else:
            identity, tokens, hit, cache = locked.pop(draw.randrange(len(locked)))
            entries = [entry.tolist() for entry in store.prefixes(identity)]
            assert longest(entries, tokens) == len(tokens)  # it was not evicted
            hit.release()
            more = [*tokens, 1, 2]
            assert holds(fed(more, cache), more)
        store.check()
    assert store.stats().evicted_bytes > 0


def test_each_shared_token_is_held_once():
    store = PrefixStore()
    for end in range(8):
        tokens = [*range(50), 90 + end]
        assert store.insert("m", torch.tensor(tokens), fed(tokens)) == 51
    assert store.nbytes == (50 + 8) * TOKEN_BYTES
    assert store.stats().entries == 8
    assert store.insert("m", torch.arange(50), fed(range(50))) == 50
    assert store.nbytes == (50 + 8) * TOKEN_BYTES
    store.clear()
    assert store.nbytes == 0
    assert store.match("m", torch.arange(50)).length == 0


def test_what_was_used_longest_ago_goes_first():
    store = PrefixStore(budget=30 * TOKEN_BYTES)
    texts = [list(range(first, first + 10)) for first in (0, 100, 200)]
    for tokens in texts:
        store.insert("m", torch.tensor(tokens), fed(tokens))
    store.match("m", torch.tensor(texts[0])).release()
    new = list(range(300, 310))
    store.insert("m", torch.tensor(new), fed(new))
    lengths = [store.match("m", torch.tensor(tokens)).length for tokens in [*texts, new]]
    assert lengths == [10, 0, 10, 10]


def test_priority_and_locks_stay():
    store = PrefixStore(budget=20 * TOKEN_BYTES)
    first, second = list(range(10)), list(range(100, 110))
    store.insert("m", torch.tensor(first), fed(first), priority=1)
    store.insert("m", torch.tensor(second), fed(second))
    third = list(range(200, 210))
    store.insert("m", torch.tensor(third), fed(third))
    held = store.match("m", torch.tensor(first))
    assert held.length == 10
    with store.match("m", torch.tensor(third)) as hit:
        assert hit.length == 10
        fourth = list(range(300, 315))
        # The first is locked by the match above, which is not released yet, and so is the third.
        assert store.insert("m", torch.tensor(fourth), fed(fourth)) == 0
    assert store.insert("m", torch.tensor(fourth), fed(fourth)) == 10
    store.check()
    assert store.stats().locked == 1
    del held
    assert store.stats().locked == 0


@pytest.mark.parametrize("hits", [1, 2])
def test_a_lock_stays_with_the_end_of_what_is_split(hits):
    store = PrefixStore(budget=20 * TOKEN_BYTES)
    whole = list(range(10))
    store.insert("m", torch.tensor(whole), fed(whole))
    locked = [store.match("m", torch.tensor(whole[: 10 - at])) for at in range(hits)]
    fork = [*range(5), 50, 51]
    store.insert("m", torch.tensor(fork), fed(fork))
    assert store.stats().locked == 1
    store.clear()
    assert [entry.tolist() for entry in store.prefixes("m")] == [whole]
    locked.pop().release()
    assert store.stats().locked == hits - 1
    del locked
    store.clear()
    store.check()
    assert (store.nbytes, store.stats().evicted_bytes) == (0, 12 * TOKEN_BYTES)


def test_an_entry_keeps_its_highest_priority():
    store = PrefixStore(budget=20 * TOKEN_BYTES)
    first, second, third = (list(range(start, start + 10)) for start in (0, 100, 200))
    for tokens, priority in ((first, 2), (first, 0), (second, 1), (third, 0)):
        store.insert("m", torch.tensor(tokens), fed(tokens), priority=priority)
    lengths = [store.known("m", torch.tensor(tokens)) for tokens in (first, second, third)]
    assert lengths == [10, 0, 10]


def test_a_hit_outlives_its_entry():
    store = PrefixStore()
    tokens = list(range(12))
    store.insert("m", torch.tensor(tokens), fed(tokens))
    cache = new_cache()
    with store.match("m", torch.tensor([*tokens[:7], 50])) as hit:
        hit.fill(cache)
    store.clear()
    assert cache.shared_bytes == 7 * TOKEN_BYTES
    assert holds(fed([*tokens[:7], 50, 51], cache), [*tokens[:7], 50, 51])


@pytest.mark.parametrize("spec", ["keep_all+int8", "keep_all+int4:centre=0@fixed:64", "window:40"])
def test_other_caches(spec):
    store = PrefixStore()
    k = torch.randn(1, 2, 30, 32)
    cache = new_cache(spec)
    for layer in cache.layers:
        layer.extend(k, k)
        layer.settle()
    store.insert("m", torch.arange(30), cache)
    other = new_cache(spec)
    with store.match("m", torch.arange(20)) as hit:
        hit.fill(other)
    q, new = torch.randn(1, 4, 1, 32), torch.randn(1, 2, 1, 32)
    cache.crop(-10)
    for one, two in zip(cache.layers, other.layers, strict=True):
        assert one.step(q, new, new, scale=0.2).equal(two.step(q, new, new, scale=0.2))


def test_rows():
    store, cache = PrefixStore(), fed(range(9))
    cache.repeat(2)
    assert store.insert("m", torch.arange(9), cache, row=1) == 9
    assert store.nbytes == 9 * TOKEN_BYTES


def test_threads():
    store = PrefixStore(budget=80 * TOKEN_BYTES)
    failures = []

    def work(seed):
        draw = random.Random(seed)
        try:
            for _ in range(80):
                tokens = [draw.randrange(2) for _ in range(draw.randrange(1, 20))]
                if draw.random() < 0.5:
                    store.insert("m", torch.tensor(tokens), fed(tokens))
                with store.match("m", torch.tensor(tokens)) as hit:
                    cache = new_cache()
                    hit.fill(cache)
                    assert holds(cache, tokens[: hit.length])
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    store.check()


def test_bad_input():
    store, cache = PrefixStore(), fed(range(9))
    before = store.stats()
    evicted = new_cache("window:4")
    ragged = new_cache("adakv(h2o:40)")
    for layer in (*evicted.layers, *ragged.layers):
        layer.step(torch.ones(1, 1, 9, 4), torch.ones(1, 1, 9, 4), torch.ones(1, 1, 9, 4), scale=1)
    cases = [
        (ShapeError, "10 tokens of row 0", torch.arange(10), cache, 0),
        (ShapeError, "of row 1", torch.arange(9), cache, 1),
        (ShapeError, "give integers", torch.rand(9), cache, 0),
        (ShapeError, "give integers", torch.zeros(2, 9, dtype=torch.int64), cache, 0),
        (UnsupportedError, "evicted some of them", torch.arange(9), evicted, 0),
        (UnsupportedError, "different tokens in each head", torch.arange(9), ragged, 0),
    ]
    for kind, message, tokens, given, row in cases:
        with pytest.raises(kind, match=message):
            store.insert("m", tokens, given, row=row)
    assert store.stats() == before
    with pytest.raises(SpecError, match="at least 1"):
        PrefixStore(budget=0)
    store.insert("m", torch.arange(9), cache)
    other = Cache(CacheSpec.parse("keep_all").layer() for _ in range(LAYERS))
    for layer in other.layers:
        layer.extend(torch.ones(1, 1, 9, 8), torch.ones(1, 1, 9, 8))
    with pytest.raises(StateError, match="entries of another model"):
        store.insert("m", torch.arange(9), other)
    with store.match("m", torch.arange(9)) as hit, pytest.raises(StateError, match="holds 9"):
        hit.fill(cache)
    for spec in ("tova:40", "keydiff:40", "keep_all+int8"):
        with (
            store.match("m", torch.arange(9)) as hit,
            pytest.raises(StateError, match="with the specs of the stored entry"),
        ):
            hit.fill(new_cache(spec))
    assert store.insert("m", torch.arange(0), cache) == 0
    assert issubclass(StateError, KVKeepError)
    store.check()
