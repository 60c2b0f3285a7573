"""How much is allocated for what is used, and what happens when there is no memory for it."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from kvkeep.errors import CapacityError, OutOfMemoryError
from kvkeep.spec import CacheSpec
from kvkeep.storage import Fixed, Growing, buffer
from kvkeep.storage.growing import Growth
from kvkeep.testing import example_planes

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
FIRST = 16  # slots of the first allocation


def planes(slots: int, device: str) -> dict[str, Tensor]:
    k = torch.zeros(1, 2, slots, 4, device=device)
    return {"k": k, "v": k, "position": torch.zeros(1, 1, slots, dtype=torch.int32, device=device)}


@pytest.mark.parametrize("factor", [None, 1.1, 1.3, 1.5])
@pytest.mark.parametrize("device", ["meta", *DEVICES[1:]])
def test_on_an_accelerator_little_is_spare(device, factor):
    storage, draw, length, moves = Growing(factor), random.Random(0), 0, 0
    for _ in range(300):
        n = draw.choice((1, 1, 1, 7, 300))
        storage.append(planes(n, device))
        length += n
        before = storage.reallocations
        if draw.random() < 0.3:
            length = draw.randrange(length)
            storage.truncate(length)
        elif length > 1:
            count = min(length - 1, draw.choice((1, 2, 40)))
            storage.evict(torch.arange(count, device=device).view(1, 1, -1))
            length -= count
        moves += storage.reallocations - before
        assert storage.length == length <= storage.capacity <= max(FIRST, 1.5 * length)
        slot_bytes = 2 * (2 * 4 * 4) + 4  # keys and values, and positions
        assert storage.nbytes <= max(FIRST * slot_bytes, 1.5 * storage.live_bytes)
    assert moves < 150


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_factor_that_is_asked_for_is_taken(device):
    storage = Growing(3.0)
    storage.append(planes(100, device))
    assert storage.capacity == 300
    storage.evict(torch.arange(40, device=device).view(1, 1, -1))
    assert storage.capacity == 300


def test_the_rule_of_each_device():
    assert Growth.on(torch.device("cpu")) == (2.0, 4.0, 2.0)
    assert Growth.on(torch.device("cuda")) == (1.25, 1.5, 1.25)
    assert Growth.on(torch.device("cuda"), 1.4) == (1.4, 1.5, 1.25)
    assert Growth.on(torch.device("cuda"), 2.0) == Growth.on(torch.device("cpu"), 2.0)


BUDGETS = [
    "h2o:64",
    "h2o:64+int4",
    "window:60,sinks=4",
    "adakv(h2o:64)",
    "h2o:64@growing:2",
    "window:64@host",
    "keep_all+kivi:4,together=8,recent=52,sinks=4",
]


@pytest.mark.parametrize("spec", BUDGETS)
def test_what_a_chunk_took_beyond_the_budget_is_given_back(spec):
    """However a prompt is cut into chunks, and after single tokens, most of which move nothing."""
    layer = CacheSpec.parse(spec).layer()

    def check() -> None:
        for part in getattr(layer.storage, "storages", (layer.storage,)):
            assert part.capacity <= max(FIRST, 1.15 * part.length)

    step(layer, 70, "cpu")
    for n in (90, 90, 1, 300, 40, 64, 17, 5, 90):
        step(layer, n, "cpu")
        check()
    before = layer.storage.reallocations
    for _ in range(40):
        step(layer, 1, "cpu")
        check()
    moved = layer.storage.reallocations - before
    assert moved <= (4 if layer.policy.ragged else 0)  # heads of adakv change their lengths


@pytest.mark.skipif(buffer.LIBRARY is None, reason="tensor operations read one segment")
@pytest.mark.parametrize("spec", ["h2o:64", "h2o:64+int8", "window:64", "tova:64"])
def test_chunks_beyond_the_budget_need_no_room_of_their_own(spec, monkeypatch):
    """They leave the same slots in the same order as with room for them."""
    layer, roomy = (CacheSpec.parse(spec).layer() for _ in range(2))
    for n in (70, 300, 1, 90):
        found = step(layer, n, "cpu")
        with monkeypatch.context() as patch:
            patch.setattr(Growing, "make_room", lambda storage, slots: True)
            assert found.equal(step(roomy, n, "cpu"))
    assert layer.positions().equal(roomy.positions())
    assert layer.storage.reallocations <= 1  # the first chunk's
    assert roomy.storage.reallocations > 3


def test_slots_below_a_bound_grow_geometrically():
    storage = Growing()
    storage.bound = 1000
    for _ in range(1000):
        storage.append(planes(1, "meta"))
        assert storage.capacity <= max(FIRST, 1.15 * storage.length)
    assert storage.capacity == 1000
    assert storage.reallocations <= 80


@pytest.mark.parametrize("device", ["meta", *DEVICES[1:]])
def test_steps_that_add_and_evict_do_not_reallocate(device):
    storage = Growing()
    storage.append(planes(1000, device))
    storage.evict(torch.arange(900, device=device).view(1, 1, -1))
    before = storage.reallocations
    for _ in range(200):
        storage.append(planes(1, device))
        storage.evict(torch.zeros(1, 1, 1, dtype=torch.int64, device=device))
    assert storage.reallocations == before


def test_growing_slowly_is_amortised():
    storage = Growing()
    for _ in range(4096):
        storage.append(planes(1, "meta"))
    assert storage.reallocations <= 26  # 16 * 1.25 ** 25 > 4096


class Scarce:
    """`reserve`, which fails at the k-th call, and from there on `times` times in all."""

    def __init__(self, monkeypatch, at: int, times: int) -> None:
        self.calls, self.at, self.times = 0, at, times
        self.reserve = buffer.reserve
        monkeypatch.setattr(buffer, "reserve", self)

    def __call__(self, *args):
        self.calls += 1
        if self.at <= self.calls < self.at + self.times:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return self.reserve(*args)


SPECS = [
    "keep_all",
    "keep_all+int8",
    "keep_all+int4/int8",
    "keep_all+kivi:4,together=4,recent=6",
    "h2o:20,recent=4",
    "adakv:0.3(h2o:24,recent=2)",
]


def fed(spec: str, device: str):
    layer = CacheSpec.parse(spec).layer()
    for n in (9, 1, 6, 1):
        step(layer, n, device)
    return layer


def step(layer, n: int, device: str) -> Tensor:
    draw = torch.Generator().manual_seed(layer.fed)
    q, k, v = (torch.randn(2, h, n, 16, generator=draw).to(device) for h in (4, 2, 2))
    return layer.step(q, k, v, scale=0.3)


@pytest.mark.parametrize("times", [1, 1000], ids=["once", "for good"])
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("device", DEVICES)
def test_without_memory_a_layer_is_as_it_was(device, spec, times, monkeypatch):
    """At whichever plane it ends, while slots grow, blocks are encoded or a past is copied."""
    failed, at = 0, 0
    while True:
        at += 1
        layer, twin = fed(spec, device), fed(spec, device)
        with monkeypatch.context() as patch:
            scarce = Scarce(patch, at, times)
            before, figures = (
                example_planes(layer),
                (layer.length, layer.fed, layer.stats().live_bytes),
            )
            try:
                done = step(layer, 90, device)
            except OutOfMemoryError:
                done = None
        if done is not None:  # it had all it needed, or could not give back
            assert done.equal(step(twin, 90, device))
            assert step(layer, 1, device).equal(step(twin, 1, device))
            if scarce.calls < at:
                break
            continue
        failed += 1
        now = example_planes(layer)
        assert now.keys() == before.keys()
        assert all(now[name].equal(before[name]) for name in now)
        assert (layer.length, layer.fed, layer.stats().live_bytes) == figures
        for n in (1, 60, 1):
            assert step(layer, n, device).equal(step(twin, n, device))
        assert example_planes(layer).keys() == example_planes(twin).keys()
    assert failed >= 2


@pytest.mark.parametrize("device", DEVICES)
def test_a_past_that_cannot_be_copied_to_evict_from_it(device, monkeypatch):
    layer, twin = fed("h2o:20,recent=4", device), fed("h2o:20,recent=4", device)
    layer.freeze()
    with monkeypatch.context() as patch:
        Scarce(patch, 6, 1)  # after the new tail's planes, in the past's own copy
        with pytest.raises(OutOfMemoryError):
            step(layer, 60, device)
    assert layer.length == 17
    assert step(layer, 1, device).shape == step(twin, 1, device).shape
    assert layer.positions().sort().values.equal(twin.positions().sort().values)


def test_giving_back_may_wait(monkeypatch):
    storage = Growing()
    k = torch.arange(1000.0).view(1, 1, -1, 1)
    storage.append({"k": k, "v": k + 1})
    Scarce(monkeypatch, 2, 1)
    storage.evict(torch.arange(100, 1000).view(1, 1, -1))
    storage.append({"k": k, "v": k + 1})
    held = storage.read()
    assert held["k"].flatten().tolist() == [*range(100), *range(1000)]
    assert held["v"].equal(held["k"] + 1)


@pytest.mark.parametrize("storage", [Growing, lambda: Fixed(8)], ids=["growing", "fixed"])
def test_repeated_rows_without_memory(storage, monkeypatch):
    storage = storage()
    k = torch.arange(6.0).view(2, 1, 3, 1)
    storage.append({"k": k, "v": k + 1})
    Scarce(monkeypatch, 2, 1)
    with pytest.raises(OutOfMemoryError):
        storage.rows(torch.tensor([0, 0, 1]))
    assert storage.read()["k"].equal(k)
    assert storage.read()["v"].equal(k + 1)


def test_the_message_says_what_helps(monkeypatch):
    layer = fed("keep_all", "cpu")
    live = layer.stats().live_bytes
    Scarce(monkeypatch, 1, 1)
    with pytest.raises(CapacityError) as caught:
        step(layer, 60, "cpu")
    message = str(caught.value)
    assert message.startswith("154 slots of a layer need ")
    assert f"live slots hold {live}" in message
    assert "h2o:4096" in message
    assert "+int8" in message
    assert isinstance(caught.value, MemoryError)
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
