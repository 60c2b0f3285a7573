"""Storages, as small literal tensors."""

from __future__ import annotations

import os
import weakref

import pytest
import torch

from kvkeep.codec import Plain
from kvkeep.errors import CapacityError, ShapeError, SpecError, UnsupportedError
from kvkeep.graph.device_step import require_fitting
from kvkeep.layer.layer import LayerCache
from kvkeep.policy import KeepAll
from kvkeep.spec import CacheSpec
from kvkeep.storage import PARTS, Concat, Fixed, Growing, buffer


def built(name):
    return CacheSpec.parse(f"keep_all@{PARTS[name].example}").storage.build(None)


@pytest.fixture(params=PARTS)
def storage(request):
    return built(request.param)


@pytest.fixture(params=["growing", "fixed"])
def in_place(request):
    return built(request.param)


def planes(*numbers: float, rows: int = 1, heads: int = 1) -> dict[str, torch.Tensor]:
    """One plane `k` (rows, heads, n, 1) of these numbers, and a shared `position`."""
    k = torch.tensor(numbers, dtype=torch.float32).view(1, 1, -1, 1).expand(rows, heads, -1, 1)
    return {"k": k, "position": torch.tensor(numbers).int().view(1, 1, -1).expand(rows, 1, -1)}


def content(storage, plane: str = "k") -> list:
    return storage.read()[plane].flatten(start_dim=2).tolist()


def test_append(storage):
    assert storage.append(planes(0, 1)) == slice(0, 2)
    assert storage.append(planes(2)) == slice(2, 3)
    assert content(storage) == [[[0, 1, 2]]]
    assert content(storage, "position") == [[[0, 1, 2]]]
    assert storage.length == 3
    assert storage.capacity >= 3


def test_append_takes_strided_input(storage):
    k = torch.arange(12.0).view(1, 3, 2, 2).transpose(1, 2)  # (B, H, n, D) as a model gives it
    storage.append({"k": k})
    storage.append({"k": k[:, :, ::2]})
    assert storage.read()["k"].equal(torch.cat([k, k[:, :, ::2]], dim=2))


def test_append_copies(storage):
    given = planes(0, 1)["k"].clone()
    storage.append({"k": given})
    given.zero_()
    assert content(storage) == [[[0, 1]]]


def test_write_overwrites_the_named_slots(storage):
    storage.append({"k": planes(0, 1, 2, heads=2)["k"]})
    storage.write(torch.tensor([[[2], [0]]]), {"k": torch.full((1, 2, 1, 1), 7.0)})
    assert content(storage) == [[[0, 1, 7], [7, 1, 2]]]


def test_evict_frees_the_victims_and_keeps_the_rest(storage):
    storage.append(planes(*range(6)))
    storage.evict(torch.tensor([[[4, 0]]]))
    assert storage.length == 4
    assert sorted(content(storage)[0][0]) == [1, 2, 3, 5]
    assert content(storage) == [[list(map(float, content(storage, "position")[0][0]))]]


def test_evict_moves_only_what_must_fill_holes(in_place):
    in_place.append(planes(*range(6)))
    in_place.evict(torch.tensor([[[4, 0]]]))
    assert content(in_place) == [[[5, 1, 2, 3]]]  # 5 fills the hole at 0; 1, 2, 3 stay


def test_evict_differs_by_row_and_head(storage):
    storage.append({"k": planes(*range(4), rows=2, heads=2)["k"]})
    storage.evict(torch.tensor([[[0], [1]], [[2], [3]]]))
    kept = storage.read()["k"].flatten(start_dim=2).sort(dim=2).values.tolist()
    assert kept == [[[1, 2, 3], [0, 2, 3]], [[0, 1, 3], [0, 1, 2]]]


def test_compiled_and_torch_evict_alike(monkeypatch):
    k, position = torch.randn(2, 3, 40, 5), torch.arange(240).view(2, 3, 40).int()
    victims = torch.stack([torch.randperm(40)[:11] for _ in range(6)]).view(2, 3, 11)
    stores = [Growing(), Growing()]
    for store in stores:
        store.append({"k": k, "position": position})
    stores[0].evict(victims)
    monkeypatch.setattr(buffer, "LIBRARY", None)
    stores[1].evict(victims)
    for name, plane in stores[0].read().items():
        assert plane.equal(stores[1].read()[name])


@pytest.mark.parametrize("count", [0, 1, 5, 9, 16])
@pytest.mark.parametrize("held", [0, 1, 7, 16])
def test_append_evicting_is_append_and_evict(storage, held, count):
    """Whether fewer slots stay than were held or more, and whichever of them are freed."""
    draw = torch.Generator().manual_seed(held)
    k, position = torch.randn(2, 3, 16, 5), torch.arange(96).view(2, 3, 16).int()
    victims = torch.stack([torch.randperm(16, generator=draw)[:count] for _ in range(6)])
    victims, twin = victims.view(2, 3, count), storage.empty_copy()
    fed = {"k": k, "position": position}
    old, new = (
        {n: x[:, :, part] for n, x in fed.items()} for part in (slice(held), slice(held, 16))
    )
    for one in (storage, twin):
        if held:
            one.append(old)
    storage.append_evicting({n: x.contiguous() for n, x in new.items()}, victims)
    twin.append(new)
    twin.evict(victims)
    assert storage.length == twin.length == 16 - count
    for name, plane in twin.read().items():
        assert storage.length == 0 or plane.equal(storage.read()[name])


@pytest.mark.skipif(buffer.LIBRARY is None, reason="tensors check their indices themselves")
@pytest.mark.parametrize("wrong", [[6], [-1], [2, 2]])
def test_victims_that_are_no_slots(in_place, wrong):
    in_place.append(planes(*range(6)))
    with pytest.raises(ShapeError, match="different slots, 0 to 5"):
        in_place.evict(torch.tensor([[wrong]]))
    assert content(in_place) == [[[0, 1, 2, 3, 4, 5]]]
    in_place.truncate(4)
    with pytest.raises(ShapeError, match="different slots, 0 to 5"):
        in_place.append_evicting(planes(4, 5), torch.tensor([[wrong]]))
    assert content(in_place) == [[[0, 1, 2, 3]]]


def test_evict_everything(storage):
    storage.append(planes(0, 1))
    storage.evict(torch.tensor([[[1, 0]]]))
    assert storage.length == 0
    storage.append(planes(5))
    assert content(storage) == [[[5]]]


def test_truncate_and_go_on(storage):
    storage.append(planes(0, 1, 2))
    storage.truncate(1)
    storage.append(planes(9))
    assert content(storage) == [[[0, 9]]]


def test_rows(storage):
    storage.append({"k": torch.tensor([[[[0.0]]], [[[1.0]]]])})
    storage.rows(torch.tensor([1, 1, 0]))
    assert content(storage) == [[[1]], [[1]], [[0]]]
    storage.append({"k": torch.full((3, 1, 1, 1), 5.0)})
    assert content(storage) == [[[1, 5]], [[1, 5]], [[0, 5]]]


def test_reset_then_another_shape(storage):
    storage.append(planes(0, 1))
    storage.reset()
    assert storage.length == 0
    storage.append(planes(3, rows=2, heads=3))
    assert content(storage) == [[[3]] * 3] * 2


def test_bytes(storage):
    storage.append(planes(0, 1, 2, rows=2, heads=3))
    slot_bytes = 2 * 3 * 4 + 2 * 4
    assert storage.live_bytes == 3 * slot_bytes
    if storage.lasting:  # otherwise there are copies too
        assert storage.nbytes == storage.capacity * slot_bytes


def test_the_view_is_the_buffer_and_no_past_byte_is_copied(in_place, monkeypatch):
    in_place.append(planes(0, 1))
    before = in_place.read()["k"]
    copied = count_copied_bytes(monkeypatch)
    in_place.append(planes(2))
    after = in_place.read()["k"]
    assert after.data_ptr() == before.data_ptr()
    assert after.untyped_storage().data_ptr() == before.untyped_storage().data_ptr()
    assert copied == [4, 4]  # one float and one position
    after[0, 0, 0] = 9.0
    assert content(in_place) == [[[9, 1, 2]]]
    assert before[0, 0, 0] == 9.0


def count_copied_bytes(monkeypatch) -> list[int]:
    copied: list[int] = []
    original = torch.Tensor.copy_

    def copy_(self, source, *args, **kwargs):
        copied.append(self.numel() * self.element_size())
        return original(self, source, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "copy_", copy_)
    return copied


def test_growing_reallocates_seldom():
    storage = Growing()
    for token in range(1024):
        storage.append(planes(token))
    assert storage.reallocations <= 12
    assert content(storage) == [[[*range(1024)]]]


def test_growing_copies_the_past_only_when_it_grows(monkeypatch):
    storage = Growing()
    copied = count_copied_bytes(monkeypatch)
    for token in range(1024):
        storage.append(planes(token))
    assert sum(copied) < 3 * storage.live_bytes  # amortised: the new, and twice at most


def test_growing_holds_one_plane_twice_at_most(monkeypatch):
    """While it grows: the live slots' new buffers, and the old one of the plane being copied."""
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    peaks: list[int] = []
    reserve = buffer.reserve

    def counting(shape, dtype, device):
        fresh = reserve(shape, dtype, device)
        alive.add(fresh)
        peaks.append(sum(x.numel() * x.element_size() for x in alive))
        return fresh

    monkeypatch.setattr(buffer, "reserve", counting)
    storage, plane = Growing(), torch.zeros(1, 1, 64, 256)
    for _ in range(20):
        storage.append({"k": plane, "v": plane})
    new, old = storage.nbytes, storage.nbytes // 2
    assert storage.reallocations >= 3
    assert new < max(peaks) <= new + old // 2


def test_growing_gives_back_what_a_large_eviction_freed():
    storage = Growing()
    storage.append(planes(*range(1000)))
    storage.evict(torch.arange(900).view(1, 1, -1))
    assert storage.capacity <= 4 * storage.length
    assert sorted(content(storage)[0][0]) == [*range(900, 1000)]


def test_growing_gives_back_what_a_large_crop_freed():
    storage = Growing()
    storage.append(planes(*range(1000)))
    storage.truncate(100)
    assert storage.capacity <= 4 * storage.length
    assert content(storage) == [[[*range(100)]]]


def test_reordering_rows_keeps_the_addresses(in_place):
    in_place.append(planes(0, 1, rows=2))
    address = in_place.read()["k"].data_ptr()
    in_place.rows(torch.tensor([1, 0]))
    assert in_place.read()["k"].data_ptr() == address


@pytest.mark.parametrize("factor", [1.0, 0.5, float("nan")])
def test_growing_must_grow(factor):
    with pytest.raises(SpecError, match="above 1"):
        Growing(factor)


def test_fixed_keeps_its_addresses_and_refuses_what_does_not_fit():
    storage = Fixed(4)
    storage.append(planes(0, 1, 2))
    address = storage.read()["k"].data_ptr()
    with pytest.raises(CapacityError, match=r"5 slots needed.*fixed at 4.*@fixed:5"):
        storage.append(planes(3, 4))
    assert content(storage) == [[[0, 1, 2]]]
    storage.append(planes(3))
    storage.reset()
    storage.append(planes(7))
    assert storage.read()["k"].data_ptr() == address
    assert storage.capacity == 4
    assert storage.reallocations == 0


def test_fixed_addresses_stay_where_they_are(storage):
    storage.append(planes(*range(8)))
    if storage.fixed_addresses:
        assert storage.capacity == storage.limit
        before = {name: plane.data_ptr() for name, plane in storage.read().items()}
        storage.append(planes(8, 9))
        storage.evict(torch.tensor([[[0, 3]]]))
        storage.truncate(4)
        storage.reset()
        storage.append(planes(*range(16)))
        assert {name: plane.data_ptr() for name, plane in storage.read().items()} == before
    else:
        assert storage.limit is None


def test_reserved_slots_stay_where_they_are(storage):
    storage.append(planes(*range(8)))
    if not storage.reserves:
        with pytest.raises(NotImplementedError):
            storage.reserve(12)
        with pytest.raises(NotImplementedError):
            storage.adopt(storage.read(), 8)
        return
    storage.reserve(12)
    assert storage.capacity >= 12
    before = storage.read()["k"].data_ptr()
    storage.append(planes(*range(8, 12)))
    assert storage.read()["k"].data_ptr() == before
    assert content(storage) == [[[*range(12)]]]
    if storage.limit is not None:
        with pytest.raises(CapacityError):
            storage.reserve(storage.limit + 1)


def test_a_limit_promises_nothing_about_addresses():
    """A step on the device asks for fixed addresses, and for slots that can be rewritten."""

    class Limited(Growing):
        limit = 64

    class Dependent(Plain):
        rewritable = False

    def fed(codec, storage):
        layer = LayerCache(KeepAll(), codec, codec, storage)
        layer.extend(*torch.zeros(2, 1, 1, 4, 8))
        return layer

    require_fitting(fed(Plain(), Fixed(64)))
    with pytest.raises(SpecError, match="growing storage can move its slots"):
        require_fitting(fed(Plain(), Limited()))
    with pytest.raises(UnsupportedError, match="codec plain needs the host"):
        require_fitting(fed(Dependent(), Fixed(64)))


def test_fixed_needs_a_slot():
    with pytest.raises(SpecError, match="at least 1"):
        Fixed(0)


def test_concat_is_differentiable():
    k = torch.ones(1, 1, 2, 1, requires_grad=True)
    storage = Concat()
    storage.append({"k": k})
    storage.append({"k": k * 2})
    storage.evict(torch.tensor([[[0]]]))
    storage.read()["k"].sum().backward()
    assert k.grad is not None
    assert k.grad.flatten().tolist() == [2, 3]


def test_buffers_outlive_inference_mode(in_place):
    with torch.inference_mode():
        in_place.append(planes(0, 1))
    in_place.append(planes(2))
    in_place.evict(torch.tensor([[[0]]]))
    assert sorted(content(in_place)[0][0]) == [1, 2]


def test_single_slots_in_every_grad_mode(in_place):
    modes = [torch.inference_mode, torch.no_grad, torch.enable_grad]
    fed = []
    for step in range(9):
        with modes[step % 3]():
            fed.append(planes(step))
            in_place.append(fed[-1])
    for name, plane in in_place.read().items():
        assert plane.equal(torch.cat([one[name] for one in fed], dim=2))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_forked_child_has_a_copy_of_its_own(in_place):
    in_place.append({"k": torch.zeros(1, 1, 8, 1 << 16)})  # large enough to be a mapping
    child = os.fork()
    if not child:
        try:
            in_place.read()["k"][0, 0, 0, 0] = 1.0  # one element: the child has no worker threads
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert in_place.read()["k"].eq(0).all()


def test_untouched_capacity_is_not_resident():
    import psutil

    process = psutil.Process()
    before = process.memory_info().rss
    storage = Fixed(1 << 20)
    storage.append({"k": torch.zeros(1, 1, 1, 64)})  # a buffer of 256 MiB
    assert process.memory_info().rss - before < 16 << 20
    assert storage.nbytes == 256 << 20


@pytest.mark.parametrize(
    "wrong",
    [torch.tensor([[[1]]], dtype=torch.int32), torch.zeros(3, 1, 1, dtype=torch.int64)],
    ids=["dtype", "rows"],
)
def test_victims_of_another_type(wrong):
    layer = CacheSpec.parse("keep_all").layer()
    layer.extend(*torch.randn(2, 1, 2, 6, 16))
    with pytest.raises((ShapeError, RuntimeError)):
        layer.storage.evict(wrong)
    assert layer.length == 6
