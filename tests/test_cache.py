"""Cache: the layers together."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from kvkeep.cache import Cache
from kvkeep.errors import CapacityError, RollbackError, ShapeError, StateError
from kvkeep.spec import CacheSpec


def new(*specs):
    return Cache(CacheSpec.parse(spec).layer() for spec in specs)


def feed(cache, n, rows=1, widths=(4, 4)):
    for layer in cache.layers:
        k, v = (torch.randn(rows, 2, n, width) for width in widths)
        layer.extend(k, v)
        layer.settle()


def test_figures():
    cache = new("keep_all", "window:3@fixed", "keep_all@concat")
    assert (cache.rows, cache.length, cache.capacity, cache.nbytes) == (0, 0, 0, 0)
    feed(cache, 5, rows=2, widths=(4, 6))
    per_slot = 2 * 2 * (4 + 6) * 4 + 2 * 4
    stats = cache.stats()
    assert cache.rows == 2
    assert cache.fed == 5
    assert stats.seen == (5, 5)
    assert (stats.length, stats.capacity) == (5, 16)
    assert stats.live_bytes == cache.live_bytes == (5 + 3 + 5) * per_slot
    assert stats.nbytes == cache.nbytes == (16 + 3 + 5) * per_slot
    assert [layer.length for layer in stats.layers] == [5, 3, 5]
    assert stats.asdict()["layers"][1]["capacity"] == 3
    feed(cache, 60, rows=2, widths=(4, 6))
    assert cache.stats().reallocations == cache.layers[0].storage.reallocations + 1 == 2


def test_layers_may_differ_in_width_and_dtype():
    cache = new("keep_all", "keep_all")
    for layer, width, dtype in zip(
        cache.layers, (4, 8), (torch.float32, torch.float64), strict=True
    ):
        k = torch.randn(1, width, 3, width, dtype=dtype)
        layer.extend(k, k)
    cache.reorder([0])
    assert cache.live_bytes == 3 * (2 * 4 * 4 * 4 + 4) + 3 * (2 * 8 * 8 * 8 + 4)


def test_crop_is_all_or_nothing():
    cache = new("keep_all", "window:3")
    feed(cache, 2)
    cache.crop(-1)
    assert [layer.fed for layer in cache.layers] == [1, 1]
    feed(cache, 9)
    assert cache.rollback_limit == 0
    with pytest.raises(RollbackError, match="crop of 2 tokens, but 0"):
        cache.crop(-2)
    assert [layer.fed for layer in cache.layers] == [10, 10]


def test_rows():
    cache = new("keep_all", "window:3@fixed")
    feed(cache, 2, rows=3)
    keys = [layer.storage.read()["k"].clone() for layer in cache.layers]

    def check(*order):
        for layer, before in zip(cache.layers, keys, strict=True):
            assert layer.storage.read()["k"].equal(before[list(order)])

    cache.reorder([2, 0, 0])
    check(2, 0, 0)
    cache.select(torch.tensor([True, True, False]))
    check(2, 0)
    cache.repeat(2)
    check(2, 2, 0, 0)
    cache.select([3])
    check(0)
    feed(cache, 1)


@pytest.mark.parametrize(
    "call",
    [
        lambda c: c.reorder([0]),
        lambda c: c.reorder([0, 2]),
        lambda c: c.select([]),
        lambda c: c.select([-1]),
        lambda c: c.select([[0]]),
        lambda c: c.select([0.0]),
        lambda c: c.select([True]),
        lambda c: c.repeat(0),
        lambda c: c.repeat(2.0),
    ],
)
def test_rows_that_do_not_exist(call):
    cache = new("keep_all", "keep_all")
    feed(cache, 2, rows=2)
    before = cache.stats()
    with pytest.raises(ShapeError):
        call(cache)
    assert cache.stats() == before


def test_an_empty_cache_takes_any_change():
    cache = new("keep_all")
    cache.crop(0)
    cache.reorder(torch.tensor([0, 1]))
    cache.repeat(2)
    cache.reset()
    assert cache.stats().seen == ()


def test_admit():
    cache = new("keep_all", "keep_all@fixed:4", "window:2@fixed")
    feed(cache, 3)
    cache.admit(1)
    with pytest.raises(CapacityError, match="fixed at 4"):
        cache.admit(2)
    cache.layers[0].extend(torch.randn(1, 2, 1, 4), torch.randn(1, 2, 1, 4))
    with pytest.raises(StateError, match=r"\[3, 4\]"):
        cache.admit(1)


def test_an_interrupted_first_forward_is_noticed():
    cache = new("keep_all", "keep_all")
    cache.layers[0].extend(torch.randn(2, 2, 3, 4), torch.randn(2, 2, 3, 4))
    with pytest.raises(StateError, match=r"\[0, 3\]"):
        cache.admit(1)


def test_a_deep_copy_holds_what_is_live():
    cache = new("keep_all", "keep_all@fixed:100000")
    feed(cache, 5)
    clone = copy.deepcopy(cache)
    feed(cache, 1)
    assert (clone.fed, clone.length) == (5, 5)
    for layer, original in zip(clone.layers, cache.layers, strict=True):
        keys = layer.storage.read()["k"]
        assert keys.equal(original.storage.read()["k"][:, :, :5])
        assert layer.stats().capacity == original.stats().capacity
    assert len(pickle.dumps(clone)) < 10_000
    feed(clone, 2)
    assert clone.length == 7
