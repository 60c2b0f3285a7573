"""Snapshots and forks: a cache goes on from where it was, to the last bit, and shares its past."""

from __future__ import annotations

from copy import deepcopy
from itertools import product
from zlib import crc32

import pytest
import torch
from support.slow import every, slow_unless
from support.two_layer_caches import SPECS, cache_of, feed, filled, go_on, held, same, tokens

from kvkeep.cache import Cache
from kvkeep.errors import CapacityError, RollbackError, ShapeError, SpecError, StateError
from kvkeep.layer.frozen import FrozenPlanes
from kvkeep.planes import unsliced
from kvkeep.spec import CacheSpec
from kvkeep.testing import promised_bytes

pytestmark = pytest.mark.usefixtures("one_thread")


IN_TURNS = [(bool(i % 2), spec) for i, spec in enumerate(SPECS)]


@pytest.mark.parametrize(
    ("ragged", "spec"),
    slow_unless(IN_TURNS.__contains__, product([False, True], SPECS)),
    ids=str,
)
def test_forks_and_snapshots_go_on_to_the_last_bit(spec, ragged):
    steps = 1 + crc32(str(spec).encode()) % 5
    cache = filled(spec, steps, ragged=ragged)
    snapshot = cache.snapshot()
    expected, other = go_on(filled(spec, steps, ragged=ragged)), None
    frozen = cache.freeze()
    first, second = frozen.fork(), frozen.fork()
    before = held(first)
    other = go_on(second, seed=900)
    assert held(first) == before  # what one fork does the other does not see
    assert same(go_on(first), expected)
    assert same(go_on(cache), expected)  # the frozen cache goes on as a fork of itself
    assert not same(other, expected)
    assert held(frozen.fork()) == before
    restored = cache_of(spec)
    for target in (restored, second):
        target.restore(snapshot)
        assert held(target) == before
        assert same(go_on(target), expected)
    for layer in first.layers:
        assert layer.stats().live_bytes == promised_bytes(layer)


@pytest.mark.parametrize("spec", [s for s in SPECS if s.policy.rollback], ids=str)
def test_a_fork_is_cropped_and_goes_on(spec):
    cache, plain = filled(spec, 5, ragged=True), filled(spec, 5, ragged=True)
    fork = cache.freeze().fork()
    for other in (plain, fork):
        feed(other, 2, 300)
    tokens_back = min(plain.rollback_limit, 5)
    assert fork.rollback_limit == plain.rollback_limit
    for other in (plain, fork):
        other.crop(-tokens_back)
    assert held(fork) == held(plain)
    assert same(go_on(fork), go_on(plain))


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_rows_of_a_fork(spec):
    frozen = filled(spec, 3, ragged=True).freeze()
    plain = filled(spec, 3, ragged=True)
    fork = frozen.fork(rows=2)
    plain.repeat(2)
    for index in ([0, 0, 1, 2], [3, 1, 1, 0]):
        for cache in (fork, plain):
            cache.reorder(index)
    assert held(fork) == held(plain)
    assert same(go_on(fork, rows=4), go_on(plain, rows=4))


def test_rows_behind_frozen_slots_without_memory(monkeypatch):
    """Frozen slots and those behind them have other rows together or not at all."""
    layers = [CacheSpec.parse("keep_all").layer() for _ in range(2)]
    q, k, v = torch.randn(3, 3, 2, 9, 8).unbind(0)
    for layer in layers:
        layer.step(q[:, :, :7], k[:, :, :7], v[:, :, :7], scale=0.4)
        layer.freeze()
        layer.step(q[:, :, 7:8], k[:, :, 7:8], v[:, :, 7:8], scale=0.4)

    def failing(*_):
        raise MemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(FrozenPlanes, "rows", failing)
        with pytest.raises(MemoryError):
            layers[0].take_rows(torch.tensor([2, 0, 1]))
    newest = [x[:, :, 8:] for x in (q, k, v)]
    assert layers[0].step(*newest, scale=0.4).equal(layers[1].step(*newest, scale=0.4))


@pytest.mark.parametrize(
    "spec", ["keep_all", "keep_all+int8", "keep_all+kivi:4,together=4,recent=4"]
)
def test_all_rows_of_a_fork_read_the_same_slots(spec):
    cache = cache_of(spec)
    feed(cache, 40, 0, rows=1)
    frozen = cache.freeze()
    one, many = frozen.stats(), frozen.fork(rows=7)
    assert many.stats().shared_bytes == one.shared_bytes
    many.reorder([3, 2, 1, 0, 0, 5, 6])
    shared = many.layers[0].slots.segments()[0]
    assert unsliced(shared.planes)["k"].shape[0] == 1
    outs = go_on(many, rows=7)
    assert many.stats().shared_bytes == one.shared_bytes
    alone = cache_of(spec)
    feed(alone, 40, 0, rows=1)
    alone.repeat(7)
    # Queries that meet codes have 16 bits, or not, by how many are computed together.
    error = 2e-5 if spec == "keep_all" else 2e-4
    for out, expected in zip(outs, go_on(alone, rows=7), strict=True):
        torch.testing.assert_close(out, expected, atol=error, rtol=1e-4)


def test_what_is_shared_is_never_written_to():
    cache = filled("keep_all", 5, ragged=False)
    frozen = cache.freeze()
    planes = [unsliced(layer.slots.segments()[0].planes) for layer in cache.layers]
    before = [{name: plane.clone() for name, plane in p.items()} for p in planes]
    forks = [frozen.fork() for _ in range(3)]
    for seed, fork in enumerate(forks):
        go_on(fork, seed=seed)
        fork.crop(-7)
        fork.reset()
        go_on(fork, seed=seed)
    for now, then in zip(planes, before, strict=True):
        assert all(now[name].equal(plane) for name, plane in then.items())


@pytest.mark.parametrize(
    "spec", ["keep_all", "keep_all@fixed", "keep_all@concat", "h2o:200,recent=8"]
)
def test_a_fork_copies_nothing_until_it_evicts(spec):
    cache = Cache([CacheSpec.parse(spec).layer(capacity=300)])
    cache.layers[0].step(*tokens(1, 150), scale=0.3)
    kept = cache.layers[0].slots.segments()[0].planes
    address, live = unsliced(kept)["k"].data_ptr(), cache.live_bytes
    fork = cache.freeze().fork()
    fork.layers[0].step(*tokens(1, 1), scale=0.3)
    first, _ = fork.layers[0].slots.segments()
    assert unsliced(first.planes)["k"].data_ptr() == address
    assert fork.live_bytes - live == live // 150
    assert fork.shared_bytes > 0.9 * live
    if "h2o" in spec:
        fork.layers[0].step(*tokens(1, 60), scale=0.3)
        assert fork.shared_bytes == 0
        assert fork.length == 200


def test_bad_input():
    cache = filled("keep_all", 2, ragged=False)
    with pytest.raises(SpecError, match="restore it to a cache of the same specs"):
        filled("window:8", 2, ragged=False).restore(cache.snapshot())
    with pytest.raises(ShapeError, match="repeat 0 times"):
        cache.freeze().fork(rows=0)
    cache.layers[0].step(*tokens(2, 1), scale=0.3)
    for change in (cache.freeze, cache.snapshot):
        with pytest.raises(StateError, match="a forward is running"):
            change()


@pytest.mark.parametrize("spec", every(2, SPECS), ids=str)
def test_a_fork_is_copied_as_a_whole(spec):
    """What was frozen is part of a snapshot, of a copy and of another freezing."""
    plain = filled(spec, 5, ragged=True)
    fork = filled(spec, 3, ragged=True).freeze().fork()
    for step, n in ((3, 5), (4, 1)):
        feed(fork, n, 10 * step)
        fork = fork.freeze().fork()
    restored = cache_of(spec)
    restored.restore(fork.snapshot())
    copied = deepcopy(fork)
    assert held(restored) == held(copied) == held(fork) == held(plain)
    expected = go_on(plain)
    for cache in (restored, copied, fork):
        assert same(go_on(cache), expected)


def test_runs_do_not_pile_up():
    cache = Cache([CacheSpec.parse("keep_all").layer()])
    for step in range(200):
        cache.layers[0].step(*tokens(1, 1, step), scale=0.3)
        cache = cache.freeze().fork()
    assert cache.length == 200
    assert len(cache.layers[0].slots.segments()) <= 10


@pytest.mark.parametrize("spec", ["keep_all@fixed:20", "window:8,sinks=2@fixed:20", "keep_all"])
def test_crop_across_what_is_frozen_makes_room(spec):
    caches = [Cache([CacheSpec.parse(spec).layer()]) for _ in range(2)]
    for cache in caches:
        cache.layers[0].step(*tokens(1, 8, 1), scale=0.3)
    caches[0] = caches[0].freeze().fork()
    for cache in caches:
        cache.crop(-4)
    outs = [cache.layers[0].step(*tokens(1, 9, 2), scale=0.3) for cache in caches]
    assert same(outs[:1], outs[1:])


@pytest.mark.parametrize("spec", ["keep_all", "keep_all@fixed", "h2o:8", "adakv(h2o:8)"])
def test_a_snapshot_is_not_changed_by_what_follows(spec):
    cache, expected = filled(spec, 3, ragged=False), go_on(filled(spec, 3, ragged=False))
    snapshot, before = cache.snapshot(), held(cache)
    if cache.rollback_limit:
        cache.crop(-4)
    feed(cache, 4, 700)  # where the newest slots were, or the evicted ones
    cache.restore(snapshot)
    assert held(cache) == before
    assert same(go_on(cache), expected)


def test_a_snapshot_that_does_not_fit_changes_nothing():
    large = Cache([CacheSpec.parse("keep_all").layer() for _ in range(2)])
    small = Cache([CacheSpec.parse(f"keep_all@fixed:{n}").layer() for n in (100, 20)])
    for cache, n in ((large, 40), (small, 5)):
        feed(cache, n, 0)
    with pytest.raises(CapacityError, match="40 slots"):
        small.restore(large.snapshot())
    assert [layer.fed for layer in small.layers] == [5, 5]


def test_ragged_heads_are_forked_with_their_gradients():
    layer = CacheSpec.parse("adakv(h2o:12)@concat").layer()
    q, k, v = tokens(1, 9)
    k.requires_grad_()
    cache = Cache([layer])
    layer.step(q, k, v, scale=0.3)
    fork = cache.freeze().fork()
    fork.layers[0].step(*tokens(1, 1), scale=0.3).sum().backward()
    assert k.grad is not None


def test_rewind_after_an_interrupted_forward():
    cache = filled("keep_all", 3, ragged=True)
    before = held(cache)
    cache.layers[0].step(*tokens(2, 3), scale=0.3)
    cache.rewind(11)
    assert held(cache) == before
    with pytest.raises(RollbackError):
        filled("h2o:8", 3, ragged=False).rewind(2)
