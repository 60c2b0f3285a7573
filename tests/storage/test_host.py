"""Slots on the host do what slots on the device do, however late the copies are made."""

from __future__ import annotations

import gc
import pickle
import random
import weakref
from copy import deepcopy
from itertools import cycle

import pytest
import torch
from support.slow import every
from torch.utils._python_dispatch import TorchDispatchMode

from kvkeep.cache import Cache
from kvkeep.errors import OutOfMemoryError, SpecError, UnsupportedError
from kvkeep.spec import CacheSpec
from kvkeep.storage import Growing, Host, copy_stream, prefetch
from kvkeep.storage.copy_stream import CopyStream
from kvkeep.storage.prefetch import StagingBuffers
from kvkeep.store.layer_slices import require_storable, why_not_keepable
from kvkeep.testing import EXAMPLES, example_planes, live_tokens

pytestmark = pytest.mark.usefixtures("one_thread")

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
LAYERS, HEADS, DIM = 4, 2, 16


class Late(CopyStream):
    """Makes copies only when they are waited for."""

    def __init__(self, device):
        super().__init__(device)
        self.waiting, self.made, self.waits = [], 0, []

    def copy(self, to, x):
        assert to.is_contiguous()
        assert x.is_contiguous()
        assert (to.shape, to.dtype) == (x.shape, x.dtype)
        self.waiting.append((to, x))

    def record_event(self):
        return self.made + len(self.waiting)

    def block_compute(self, event):
        for _ in range((event or 0) - self.made):
            to, x = self.waiting.pop(0)
            to.copy_(x)
            self.made += 1

    def finish(self, event=None):
        self.waits.append((event, self.record_event()))
        self.block_compute(self.record_event() if event is None else event)


@pytest.fixture(params=["at once", "late"])
def copies(request, monkeypatch):
    if request.param == "late":
        monkeypatch.setattr(prefetch, "CopyStream", Late)
    return request.param


def cache_of(spec, layers=LAYERS):
    parsed = CacheSpec.parse(spec)
    return Cache([parsed.layer(index=i, count=layers) for i in range(layers)])


def feed(cache, n, device="cpu", rows=2, pad=0):
    outs, start = [], cache.fed
    position = None
    if pad:
        position = torch.arange(start, start + n).repeat(rows, 1)
        position[0] = (position[0] - pad).clamp(min=-1)
        position = position.to(device)
    for i, layer in enumerate(cache.layers):
        draw = torch.Generator().manual_seed(1000 * i + start)
        shapes = (3 * HEADS, HEADS, HEADS)
        q, k, v = (torch.randn(rows, h, n, DIM, generator=draw).to(device) for h in shapes)
        outs.append(layer.step(q, k, v, position, scale=0.3))
    return torch.stack(outs)


def held(cache):
    """What is live, in the order of positions."""
    return [
        [[sorted(zip(p, k.tolist(), v.tolist(), strict=True)) for p, k, v in row] for row in rows]
        for rows in map(live_tokens, cache.layers)
    ]


CODECS = cycle(["plain", "int8", "int4/int8"])


@pytest.mark.parametrize(
    "spec", every(2, [f"{example}+{next(CODECS)}" for example in EXAMPLES.values()])
)
@pytest.mark.parametrize("device", DEVICES)
def test_steps_are_those_of_growing_storage(device, spec, copies):
    host, growing = cache_of(f"{spec}@host"), cache_of(f"{spec}@growing")
    for step, n in enumerate((9, 1, 1, 1, 5, 1, 40, 1, 1)):
        pad = 3 if not step else 0
        out, expected = (feed(cache, n, device, pad=pad) for cache in (host, growing))
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    assert held(host) == held(growing)
    assert host.live_bytes == growing.live_bytes


@pytest.mark.parametrize("seed", every(3, range(5)))
@pytest.mark.parametrize("spec", ["keep_all", "window:9,sinks=2+int8", "random:12", "h2o:12"])
@pytest.mark.parametrize("device", DEVICES)
def test_whatever_is_done_to_a_cache(device, spec, seed, copies):
    draw = random.Random(seed)
    both = [cache_of(f"{spec}@{storage}") for storage in ("host", "growing")]
    saved = None
    for _ in range(25):
        act = draw.choice(["feed", "feed", "feed", "crop", "rows", "save", "back", "fork", "copy"])
        rows = both[0].rows or 2
        if act == "feed":
            n = draw.choice((1, 1, 1, 2, 7, 30))
            out, expected = (feed(cache, n, device, rows) for cache in both)
            torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
        elif act == "crop":
            limit = min(cache.rollback_limit for cache in both)
            back = draw.randint(0, min(limit, both[0].fed))
            for cache in both:
                cache.crop(-back)
        elif act == "rows" and both[0].fed:
            index = [draw.randrange(rows) for _ in range(draw.choice((rows, rows, 1, 3)))]
            for cache in both:
                cache.select(index)
        elif act == "save":
            saved = [cache.snapshot() for cache in both]
        elif act == "back" and saved is not None:
            for cache, snapshot in zip(both, saved, strict=True):
                cache.restore(snapshot)
        elif act == "fork":
            both = [cache.freeze().fork() for cache in both]
        elif act == "copy":
            both = [deepcopy(cache) for cache in both]
        if draw.random() < 0.2:  # seldom, for it waits for all copies
            assert held(both[0]) == held(both[1])
    assert held(both[0]) == held(both[1])


def rested(storage):
    """What lies on the host, if it does, in the order of positions."""
    planes = storage.resting()
    rows = planes["position"].shape[0]
    return [
        [sorted(zip(planes["position"][b, 0].tolist(), k.tolist(), strict=True)) for k in heads]
        for b, heads in zip(range(rows), planes["k"], strict=True)
    ]


@pytest.mark.parametrize("shared", [1, 3])
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("device", DEVICES)
def test_whatever_is_done_to_storages(device, seed, shared, copies):
    """Of which only the one whose turn it is stays on the device, if there are several."""
    draw, common = random.Random(seed), {}
    pairs = [[Host(), Growing()] for _ in range(shared)]
    for host, _ in pairs:
        host.share(common)
    position = 0
    for _ in range(60):
        for both in pairs if shared > 1 else pairs * 3:
            length, act = both[0].length, draw.choice(["add", "add", "evict", "evict", "other"])
            if act == "add" or not length:
                n = draw.choice((1, 1, 2, 9))
                rows = both[0].read()["position"].shape[0] if length else 2
                place = torch.arange(position, position + n, dtype=torch.int32).expand(rows, 1, -1)
                k = torch.randn(rows, 2, n, 3) if length else torch.randn(2, 2, n, 3)
                position += n
                planes = {"k": k.to(device), "position": place.to(device)}
                for storage in both:
                    storage.append(planes)
            elif act == "evict":
                count = draw.randint(0, min(length, draw.choice((1, 4, 40))))
                victims = torch.tensor([[draw.sample(range(length), count)]], dtype=torch.int64)
                for storage in both:
                    storage.evict(victims.to(device))
            else:
                change = draw.choice(["cut", "rows", "write", "copy"])
                if change == "cut":
                    cut = draw.randint(0, length)
                    for storage in both:
                        storage.truncate(cut)
                elif change == "rows":
                    index = torch.randint(2, (draw.choice((2, 2, 3)),)).to(device)
                    for storage in both:
                        storage.rows(index)
                elif change == "write":
                    slots = torch.tensor([[draw.sample(range(length), 1)]]).to(device)
                    old = {
                        n: p.gather(2, slots.expand(p.shape[0], 1, 1))
                        for n, p in both[1].read().items()
                        if n != "k"
                    }
                    k = torch.randn(old["position"].shape[0], 2, 1, 3).to(device)
                    for storage in both:
                        storage.write(slots, {"k": k, **old})
                else:
                    both[:] = [deepcopy(storage) for storage in both]
                    both[0].share(common)
            if draw.random() < 0.15:
                assert rested(both[0]) == rested(both[1])
            if draw.random() < 0.15:
                for name, plane in both[1].read().items():
                    assert both[0].read()[name].equal(plane)
    for both in pairs:
        assert rested(both[0]) == rested(both[1])
        assert both[0].live_bytes == both[1].live_bytes


def test_snapshots_go_from_one_storage_to_another(copies):
    host, growing = cache_of("h2o:12@host"), cache_of("h2o:12@growing")
    feed(host, 20)
    growing.restore(host.snapshot())
    assert held(host) == held(growing)
    again = cache_of("h2o:12@host")
    again.restore(growing.snapshot())
    torch.testing.assert_close(feed(again, 3), feed(growing, 3))


def test_views_of_all_layers_at_once(copies):
    """A view that is read late, after other layers were, is fetched again."""
    host, growing = cache_of("keep_all@host"), cache_of("keep_all@growing")
    for cache in (host, growing):
        feed(cache, 6)
    views = [[layer.slots.segments()[0] for layer in cache.layers] for cache in (host, growing)]
    for mine, expected in [*zip(*views, strict=True), *zip(*views, strict=True)]:
        assert mine.keys(torch.float32).equal(expected.keys(torch.float32))
        assert mine.values(torch.float32).equal(expected.values(torch.float32))


@pytest.fixture
def fetches(monkeypatch):
    made = []
    fetch = StagingBuffers._fetch

    def recorded(self, storage, buffer):
        made.append(storage)
        fetch(self, storage, buffer)

    monkeypatch.setattr(StagingBuffers, "_fetch", recorded)
    return made


@pytest.mark.parametrize("spec", ["keep_all@host", "h2o:8@host", "window:6+int8@host"])
def test_each_layer_is_fetched_while_the_one_before_it_is_read(spec, fetches):
    cache = cache_of(spec)
    for _ in range(3):
        feed(cache, 5)
    storages = [layer.storage.large_planes for layer in cache.layers]
    for index, layer in enumerate(cache.layers):
        fetches.clear()
        layer.step(*(torch.randn(2, h, 1, DIM) for h in (6, 2, 2)), scale=0.3)
        assert fetches == [storages[(index + 1) % LAYERS]]


def test_a_layer_alone_is_fetched_once(fetches):
    cache = cache_of("h2o:8@host", layers=1)
    for _ in range(5):
        feed(cache, 5)
    assert len(fetches) == 1


@pytest.mark.parametrize("spec", ["keep_all", "h2o:16"])
def test_steady_steps_wait_for_copies_of_the_step_before_only(spec, monkeypatch):
    monkeypatch.setattr(prefetch, "CopyStream", Late)
    cache = cache_of(f"{spec}@host")
    for n in (40, 1, 1):
        feed(cache, n)
    stream = cache.layers[0].storage.large_planes.buffers.copies
    for _ in range(5):
        before, stream.waits = stream.record_event(), []
        feed(cache, 1)
        # The last layer has the first one fetched, whose copies are as old as three layers are.
        assert len(stream.waits) == (0 if spec == "keep_all" else LAYERS)
        events = [event for event, _ in stream.waits]
        assert all(mark <= before for mark in events[:-1])
        assert all(event < now for event, now in stream.waits)


class Unwaited(TorchDispatchMode):
    """The storages written since the copies were last told to wait for what is computed."""

    def __init__(self):
        super().__init__()
        self.written = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if not func.is_view:
            made = out if isinstance(out, (tuple, list)) else [out]
            tensors = [x for x in (*made, *args[:1]) if isinstance(x, torch.Tensor)]
            self.written |= {x.untyped_storage().data_ptr(): func for x in tensors}
        return out


@pytest.mark.parametrize("spec", ["h2o:12+int8", "random:12", "keep_all", "window:9,sinks=2"])
def test_copies_wait_for_what_they_copy(spec, monkeypatch):
    """On a device a copy runs stream the computations that were asked for after its wait."""
    unwaited = Unwaited()

    class Watched(CopyStream):
        def wait_for_compute(self):
            unwaited.written.clear()

        def copy(self, to, x):
            assert x.untyped_storage().data_ptr() not in unwaited.written
            super().copy(to, x)
            unwaited.written.pop(to.untyped_storage().data_ptr(), None)

    monkeypatch.setattr(prefetch, "CopyStream", Watched)
    cache = cache_of(f"{spec}@host", layers=2)
    with unwaited:
        for n in (24, 1, 1, 7):
            feed(cache, n)


def test_two_layers_are_on_the_device_at_a_time():
    cache = cache_of("keep_all@host", layers=6)
    for _ in range(4):
        feed(cache, 100)
    buffers = cache.layers[0].storage.large_planes.buffers
    assert len({id(layer.storage.large_planes.buffers) for layer in cache.layers}) == 1
    sizes = [buffers.nbytes(layer.storage.large_planes) for layer in cache.layers]
    assert sum(size > 0 for size in sizes) == 2
    largest = max(
        sum(p.slot_bytes for p in layer.storage.large_planes.layout) * 400 for layer in cache.layers
    )
    assert max(sizes) <= 4 * largest  # as much as is spare on the CPU
    assert cache.nbytes >= cache.live_bytes + sum(sizes)


def test_staging_buffers_shrink_after_a_long_prompt_was_evicted():
    cache = cache_of("random:12@host")
    feed(cache, 4000)
    for _ in range(3):
        feed(cache, 1)
    slot = sum(p.slot_bytes for p in cache.layers[0].storage.large_planes.layout)
    assert max(s.nbytes for s in _staging(cache)) <= 4 * (slot * 14 + 512)
    assert all(layer.stats().capacity <= 64 for layer in cache.layers)


def _staging(cache):
    buffers = cache.layers[0].storage.large_planes.buffers
    return buffers._current, buffers._other


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("where", [prefetch, copy_stream])
@pytest.mark.parametrize("spec", ["keep_all", "keep_all+int8", "h2o:20", "adakv:0.3(h2o:24)"])
def test_without_memory_a_layer_is_as_it_was(device, where, spec, monkeypatch):
    """On the device, for its copy, and on the host, for all planes."""
    failed, at = 0, 0
    while True:
        at += 1
        caches = cache_of(f"{spec}@host"), cache_of(f"{spec}@host")
        for cache in caches:
            for n in (9, 1, 7):
                feed(cache, n, device)
        layer = caches[0].layers[1]
        before = example_planes(layer)
        calls = []
        with monkeypatch.context() as patch:
            owner, name = (where, "reserve") if where is prefetch else (CopyStream, "_reserve")
            reserve = getattr(owner, name)

            def scarce(*args, calls=calls, reserve=reserve, at=at):
                calls.append(args)
                if len(calls) == at:
                    error = torch.OutOfMemoryError if where is prefetch else RuntimeError
                    raise error("out of memory")
                return reserve(*args)

            patch.setattr(owner, name, scarce)
            try:
                step_of(caches[0], 1, 60, device)
            except OutOfMemoryError as error:
                assert "h2o:4096" in str(error)  # noqa: PT017
                assert calls
                raised = True
            else:
                raised = False
        if not raised:
            step_of(caches[1], 1, 60, device)
        failed += raised
        if not raised and len(calls) < at:
            break
        if raised:
            now = example_planes(layer)
            assert all(now[name].equal(before[name]) for name in before)
        torch.testing.assert_close(*(step_of(cache, 1, 3, device) for cache in caches))
    assert failed


@pytest.mark.parametrize("spec", ["keep_all", "h2o:20"])
def test_with_memory_now_and_then(spec, copies, monkeypatch):
    """What could not be fetched ahead is fetched when it is needed, or refused then."""
    host, growing = cache_of(f"{spec}@host"), cache_of(f"{spec}@growing")
    draw, reserve, failed = random.Random(0), prefetch.reserve, 0

    def scarce(*args):
        if draw.random() < 0.4:
            raise torch.OutOfMemoryError("out of memory")
        return reserve(*args)

    monkeypatch.setattr(prefetch, "reserve", scarce)
    monkeypatch.setattr(prefetch.Growth, "room", lambda self, slots: slots)
    for n in (9, 1, 12, 1, 40, 1, 1, 100, 1):
        for index, layer in enumerate(host.layers):
            expected, before = step_of(growing, index, n, "cpu"), layer.fed
            while layer.fed == before:
                try:
                    out = step_of(host, index, n, "cpu")
                except OutOfMemoryError:
                    failed += 1
            torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    assert failed


def test_layers_that_were_used_before_they_met(copies):
    caches = cache_of("h2o:12@host"), cache_of("h2o:12@growing")
    layers = [CacheSpec.parse("h2o:12@host").layer() for _ in range(LAYERS)]
    alone = [Cache([layer]) for layer in layers]
    for n in (20, 1):
        for i, cache in enumerate(alone):
            step_of(cache, 0, n, "cpu")
            step_of(caches[1], i, n, "cpu")
    together = Cache(layers)
    assert held(together) == held(caches[1])


def step_of(cache, index, n, device):
    layer = cache.layers[index]
    draw = torch.Generator().manual_seed(layer.fed)
    shapes = (3 * HEADS, HEADS, HEADS)
    q, k, v = (torch.randn(2, h, n, DIM, generator=draw).to(device) for h in shapes)
    return layer.step(q, k, v, scale=0.3)


def test_blocks_of_tokens_are_refused():
    with pytest.raises(SpecError, match=r"kivi.*host storage.*int8, or @growing"):
        CacheSpec.parse("keep_all+kivi@host").layer()


def test_stores_refuse_it():
    with pytest.raises(UnsupportedError, match=r"host storage.*@growing"):
        require_storable(cache_of("keep_all@host"), why_not_keepable)


def test_forks_have_copies_of_their_own():
    cache = cache_of("keep_all@host")
    feed(cache, 20)
    fork = cache.freeze().fork(rows=2)
    assert cache.stats().shared_bytes == 0
    assert fork.live_bytes == 2 * cache.live_bytes
    found = {id(layer.storage.large_planes.buffers) for c in (cache, fork) for layer in c.layers}
    assert len(found) == 2


@pytest.mark.parametrize("copied", [deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))])
def test_copies_share_staging_buffers_among_their_layers(copied, copies):
    cache = cache_of("h2o:12@host")
    for n in (20, 1):
        feed(cache, n)
    if copies == "at once":
        other = copied(cache)
        assert len({id(layer.storage.large_planes.buffers) for layer in other.layers}) == 1
        assert (
            other.layers[0].storage.large_planes.buffers
            is not cache.layers[0].storage.large_planes.buffers
        )
        assert other.stats().reallocations == cache.stats().reallocations
        assert feed(other, 4).equal(feed(cache, 4))


def test_storages_are_freed_with_their_cache():
    gc.collect()
    gc.disable()
    try:
        cache = cache_of("h2o:12@host")
        for _ in range(3):
            feed(cache, 20)
        planes = [
            weakref.ref(p) for x in cache.layers for p in x.storage.large_planes.host.values()
        ]
        buffer = weakref.ref(_staging(cache)[0].arena)
        del cache
        assert all(plane() is None for plane in planes)
        assert buffer() is None
    finally:
        gc.enable()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_host_planes_are_pinned_and_small_ones_on_the_device():
    cache = cache_of("h2o:12@host")
    feed(cache, 20, "cuda")
    storage = cache.layers[0].storage
    assert all(plane.is_pinned() for plane in storage.large_planes.host.values())
    assert all(plane.is_cuda for plane in storage.small_planes.read().values())
    assert all(plane.is_cuda for plane in storage.read().values())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("spec", ["keep_all", "h2o:3000", "keep_all+int8"])
def test_large_layers_on_cuda_while_the_device_is_busy(spec):
    """Long enough that a copy which waits for too little shows."""
    host, growing = cache_of(f"{spec}@host", 6), cache_of(f"{spec}@growing", 6)
    busy = torch.randn(4096, 4096, device="cuda")
    for n in (5000, *[1] * 20):
        for _ in range(5):
            busy = torch.tanh(busy @ busy)
        out, expected = feed(host, n, "cuda"), feed(growing, n, "cuda")
        torch.testing.assert_close(out, expected, atol=1e-4, rtol=1e-4)
    assert held(host) == held(growing)


def test_spec():
    spec = CacheSpec.parse("keep_all@host")
    assert str(spec) == "keep_all+plain@host"
    assert isinstance(spec.layer().storage, Host)
    with pytest.raises(SpecError, match="takes no options"):
        CacheSpec.parse("keep_all@host:3")
