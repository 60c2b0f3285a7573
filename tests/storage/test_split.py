"""Rows and heads of different lengths, in parts of their own."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from functools import partial

import pytest
import torch

from kvkeep.errors import OutOfMemoryError, RollbackError, StateError
from kvkeep.planes import POSITION
from kvkeep.policy.replay import ReplayPolicy
from kvkeep.spec import CacheSpec
from kvkeep.storage import Growing, Split, buffer, split
from kvkeep.storage.split import MOST_EMPTY, alike, parted
from kvkeep.testing import check_layer, live_tokens

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTHS = (12, 90, 9, 100, 47)
COLUMNS, HEADS, GROUP, DIM = max(LENGTHS), 2, 2, 8
SPECS = [
    "keep_all",
    "keep_all+int8",
    "keep_all@host",
    "window:40,sinks=2",
    "h2o:40",
    "h2o:200",
    "knorm:40+int4:recent=0,sinks=0",
    "adakv(h2o:24)",
    "adakv(h2o:200)",
]
NEAR = {"atol": 3e-6, "rtol": 0}


def drawn(rows: int, n: int, seed: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    heads = (HEADS * GROUP, HEADS, HEADS)
    return [torch.randn(rows, h, n, DIM, generator=draw) for h in heads]


def prompt(side: str) -> torch.Tensor:
    """Positions (B, n) of rows padded on a side."""
    position = torch.full((len(LENGTHS), COLUMNS), -1)
    for row, n in enumerate(LENGTHS):
        columns = slice(COLUMNS - n, None) if side == "left" else slice(n)
        position[row, columns] = torch.arange(n)
    return position


def filled(spec: str, side: str = "left", chunk: int = COLUMNS):
    layer = CacheSpec.parse(spec).layer()
    q, k, v = drawn(len(LENGTHS), COLUMNS, 0)
    position = prompt(side)
    for at in range(0, COLUMNS, chunk):
        part = slice(at, at + chunk)
        layer.step(q[:, :, part], k[:, :, part], v[:, :, part], position[:, part], scale=0.4)
    return layer


def rows_alone(spec: str, side: str = "left") -> list:
    q, k, v = drawn(len(LENGTHS), COLUMNS, 0)
    layers = []
    for row, place in enumerate(prompt(side)):
        own = place >= 0
        layers.append(CacheSpec.parse(spec).layer())
        layers[-1].step(*(x[row : row + 1, :, own] for x in (q, k, v)), scale=0.4)
    return layers


def single(layer, seed: int, rows: slice = slice(None)) -> torch.Tensor:
    q, k, v = (x[rows] for x in drawn(len(LENGTHS), 1, seed))
    return layer.step(q, k, v, scale=0.4)


def places(layer) -> list:
    return [[sorted(place) for place, _, _ in row] for row in live_tokens(layer)]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("spec", SPECS)
def test_a_ragged_batch_is_its_rows_and_holds_no_more(spec, side):
    layer, alone = filled(spec, side), rows_alone(spec, side)
    assert layer.stats().live_bytes <= 1.2 * sum(one.stats().live_bytes for one in alone)
    for seed in range(1, 4):
        out = single(layer, seed)
        for row, one in enumerate(alone):
            own = slice(row, row + 1)
            torch.testing.assert_close(out[own], single(one, seed, own), **NEAR)
            assert places(layer)[row] == places(one)[0]
    assert layer.stats().live_bytes <= 1.2 * sum(one.stats().live_bytes for one in alone)


@pytest.mark.parametrize("spec", ["keep_all", "window:40"])
@pytest.mark.parametrize("chunk", [7, 60])
def test_rows_are_parted_again_as_chunks_come(spec, chunk):
    """Of which a row may get nothing but padding."""
    layer, alone = filled(spec, chunk=chunk), rows_alone(spec)
    assert layer.stats().live_bytes <= 1.2 * sum(one.stats().live_bytes for one in alone)
    for row, one in enumerate(alone):
        assert places(layer)[row] == places(one)[0]


def test_rows_that_are_nearly_alike_stay_together():
    layer = CacheSpec.parse("keep_all").layer()
    position = torch.stack([torch.arange(20), torch.arange(20) - 4]).clamp(min=-1)
    layer.step(*drawn(2, 20, 0), position, scale=0.4)
    assert isinstance(layer.storage, Growing)
    assert layer.rollback_limit == 20


@pytest.mark.parametrize("spec", ["keep_all", "h2o:40", "adakv(h2o:24)"])
def test_rows_are_selected_and_repeated(spec):
    index = torch.tensor([3, 1, 2, 0, 3])  # rows of one part in another order
    layer = filled(spec)
    before = places(layer)
    layer.take_rows(index)
    assert places(layer) == [before[row] for row in index]
    out = layer.step(*(x[index] for x in drawn(len(LENGTHS), 1, 5)), scale=0.4)
    torch.testing.assert_close(out, single(filled(spec), 5)[index], **NEAR)
    layer.take_rows(torch.tensor([0]))
    assert isinstance(layer.storage, Split) == layer.policy.ragged


@pytest.mark.parametrize("spec", ["keep_all", "h2o:40+int8", "adakv(h2o:24)", "knorm:40"])
@pytest.mark.parametrize("how", ["restore", "fork", "deepcopy"])
def test_copies(spec, how):
    layer = filled(spec)
    single(layer, 1)
    if how == "restore":
        copied = CacheSpec.parse(spec).layer()
        copied.restore(layer.state().copy())
    else:
        layer.freeze()
        copied = layer.fork() if how == "fork" else deepcopy(layer)
    assert copied.stats().live_bytes <= 1.1 * layer.stats().live_bytes
    assert places(copied) == places(layer)
    for seed in (2, 3):
        torch.testing.assert_close(single(copied, seed), single(layer, seed), **NEAR)
    assert places(copied) == places(layer)


@pytest.mark.parametrize("restored", [False, True])
def test_crop(restored):
    layer, twin = filled("keep_all"), filled("keep_all")
    for seed in (1, 2):
        single(layer, seed)
    if restored:
        layer.restore(layer.state().copy())
        assert isinstance(layer.storage, Split)
    assert layer.rollback_limit == 2
    layer.crop(-1)
    single(twin, 1)
    assert places(layer) == places(twin)
    assert single(layer, 7).equal(single(twin, 7))
    with pytest.raises(RollbackError):
        layer.crop(-5)


def test_a_restored_batch_that_is_not_parted_is_cropped():
    """The newest slots of a shorter row are its last."""
    layer = CacheSpec.parse("keep_all").layer()
    position = torch.stack([torch.arange(20), torch.arange(20) - 12]).clamp(min=-1)
    layer.step(*drawn(2, 20, 0), position, scale=0.4)
    for seed in range(30):  # until the rows are nearly alike
        layer.step(*drawn(2, 1, seed), scale=0.4)
    other = CacheSpec.parse("keep_all").layer()
    other.restore(layer.state().copy())
    assert isinstance(other.storage, Growing)
    for one in (layer, other):
        one.crop(-3)
        assert places(one) == [[[*range(47)]] * HEADS, [[*range(35)]] * HEADS]


def test_decisions_are_repeated_as_they_were_recorded():
    """A recorded count includes empty slots, so none are freed while it is made or repeated."""
    spec = CacheSpec.parse("h2o:60")
    recorded = CacheSpec.parse("h2o:60@concat").layer()
    recorded.cursor.evicted = []
    repeated = replace(spec, policy=ReplayPolicy(spec.policy, recorded.cursor.evicted)).layer()
    position = torch.stack([torch.arange(100) - 70, torch.arange(100) - 50]).clamp(min=-1)
    for layer in (recorded, repeated):
        layer.step(*drawn(2, 100, 0), position, scale=0.4)
        for seed in range(15):
            layer.step(*drawn(2, 1, seed), scale=0.4)
    assert places(repeated) == places(recorded)


def test_without_memory_rows_stay_together(monkeypatch):
    layer, calls = CacheSpec.parse("keep_all").layer(), []
    q, k, v = drawn(len(LENGTHS), COLUMNS, 0)

    def reserve(*args):
        calls.append(args)
        if len(calls) > 5:
            raise torch.OutOfMemoryError("no memory")
        return whole(*args)

    whole = buffer.reserve
    monkeypatch.setattr(buffer, "reserve", reserve)
    layer.step(q, k, v, prompt("left"), scale=0.4)
    assert len(calls) == 6
    assert isinstance(layer.storage, Growing)
    assert [len(row[0]) for row in places(layer)] == list(LENGTHS)


def test_no_memory_for_some_part(monkeypatch):
    layer, twin = filled("keep_all"), filled("keep_all")
    before = places(layer)

    def reserve(shape, *args):
        if shape[0] == len(layer.storage.parts[-1].rows):
            raise torch.OutOfMemoryError("no memory")
        return whole(shape, *args)

    whole = buffer.reserve
    with monkeypatch.context() as patch:
        patch.setattr(buffer, "reserve", reserve)
        with pytest.raises(OutOfMemoryError):
            layer.step(*drawn(len(LENGTHS), 300, 1), scale=0.4)
    assert places(layer) == before
    assert single(layer, 1).equal(single(twin, 1))


@pytest.mark.parametrize("counts", [LENGTHS, (5,), (0, 0), (0, 8), (100,) * 4, range(1, 40)])
def test_groups_are_few_and_alike(counts):
    groups = alike(list(counts))
    assert sorted(index for group in groups for index in group) == [*range(len(counts))]
    held = sum(len(group) * max(counts[i] for i in group) for group in groups)
    assert held <= MOST_EMPTY * sum(counts)
    assert len(groups) <= 7


def test_parts_keep_the_order_of_tokens():
    position = torch.tensor([[[0, -1, 1, -1, -1, 2]], [[0, 1, 2, 3, 4, 5]]]).int()
    found = parted({POSITION: position, "k": position[..., None].float()}, Growing(), by_head=False)
    assert found is not None
    assert [s.read()[POSITION].flatten().tolist() for s in found.storages] == [
        [0, 1, 2, 3, 4, 5],
        [0, 1, 2],
    ]


def test_each_head_has_sinks_of_its_own():
    """While nothing is evicted, as if heads were not apart."""
    sinks, outs = torch.tensor([0.0, 1.0, 2.0, 3.0]), []
    for spec in ("adakv(h2o:24)", "keep_all"):
        layer = CacheSpec.parse(spec).layer()
        outs.append(layer.step(*drawn(2, 9, 0), scale=0.4, sinks=sinks))
    torch.testing.assert_close(*outs, **NEAR)


def test_truncated_parts_lose_as_many_slots_each():
    planes = {"k": torch.arange(9.0).view(1, 1, 9, 1).expand(1, 2, -1, -1)}
    planes[POSITION] = torch.arange(9, dtype=torch.int32).expand(1, 2, -1).contiguous()
    storage = Split(Growing(), by_head=True)
    storage.append(planes)
    storage.storages[0].truncate(5)
    storage.truncate(7)  # two of the longest part's nine
    assert [part.length for part in storage.storages] == [3, 7]
    storage.truncate(2)
    assert [part.length for part in storage.storages] == [0, 2]


def test_a_parted_layer_is_what_the_oracle_was_fed():
    from kvkeep.testing import OracleLayer

    layer = filled("keep_all+int8")
    q, k, v = drawn(len(LENGTHS), COLUMNS, 0)
    oracle = OracleLayer(layer.policy.reach, layer.window)
    oracle.step(q, k, v, prompt("left"), scale=0.4)
    check_layer(layer, oracle)


@pytest.mark.parametrize("spec", ["adakv(h2o:24)", "h2o:40"])
def test_an_error_in_the_midst_of_an_eviction(spec, monkeypatch):
    """Some parts have evicted and others have not: nothing is computed with that."""
    layer = filled(spec)
    layer.plans = False  # native steps evict without the storage's method
    evict, calls = Growing.evict, []

    def failing(storage, victims):
        calls.append(storage)
        if len(calls) == 2:
            raise MemoryError("no memory for this part")
        evict(storage, victims)

    monkeypatch.setattr(Growing, "evict", failing)
    with pytest.raises(MemoryError):
        list(map(partial(single, layer), range(30)))
    monkeypatch.undo()
    with pytest.raises(StateError, match="failed"):
        single(layer, 1)
    layer.reset()
    assert layer.step(*drawn(1, 9, 1), scale=0.4).isfinite().all()


def test_an_error_while_rows_change(monkeypatch):
    """Some parts have other rows and others have not: nothing is computed with that."""
    layer, rows, calls = filled("keep_all"), Growing.rows, []

    def failing(storage, index):
        calls.append(storage)
        if len(calls) == 2:
            raise MemoryError("no memory for this part")
        rows(storage, index)

    monkeypatch.setattr(Growing, "rows", failing)
    with pytest.raises(MemoryError):
        layer.take_rows(torch.arange(len(LENGTHS)).flip(0))
    monkeypatch.undo()
    with pytest.raises(StateError, match="failed"):
        single(layer, 1)


def test_an_error_before_an_eviction_takes_the_step_back(monkeypatch):
    layer, twin = (CacheSpec.parse("h2o:12").layer() for _ in range(2))
    for one in (layer, twin):
        one.step(*drawn(2, 12, 0), scale=0.4)

    def failing(*_):
        raise MemoryError("no memory for anything")

    monkeypatch.setattr(Growing, "evict", failing)
    with pytest.raises(MemoryError):
        layer.step(*drawn(2, 1, 1), scale=0.4)
    monkeypatch.undo()
    assert layer.fed == layer.length == 12
    assert live_tokens(layer)[0][0][0] == live_tokens(twin)[0][0][0]


def test_a_prompt_that_fits_is_kept_without_memory_to_part_it(monkeypatch):
    def failing(*_):
        raise torch.OutOfMemoryError("none left")

    monkeypatch.setattr(split, "take", failing)
    layer = filled("keep_all")
    assert not isinstance(layer.storage, Split)
    assert layer.fed == layer.length == COLUMNS


def test_parts_that_are_full_are_not_parted_again():
    layer = filled("keep_all")
    before = layer.storage
    position = torch.tensor(LENGTHS)[:, None] + torch.arange(8)
    layer.step(*drawn(len(LENGTHS), 8, 1), position, scale=0.4)
    assert layer.storage is before
    assert layer.rollback_limit == 8


def test_what_follows_a_reset_is_whole_again():
    layer = filled("keep_all")
    layer.reset()
    layer.step(*drawn(2, 20, 0), scale=0.4)
    layer.freeze()
    assert layer.stats().shared_bytes


def test_columns_stay_known_when_rows_are_parted_again():
    layer = filled("keep_all", side="right", chunk=25)
    kinds = layer.history.kinds
    assert kinds is not None
    assert (kinds == 0).equal(prompt("right") >= 0)
    layer.take_rows(torch.tensor([2, 0, 1]))
    assert layer.history.kinds.equal(kinds[[2, 0, 1]])


def test_adakv_crops_padding_where_the_first_head_is_not_the_longest():
    layer = CacheSpec.parse("adakv:0(knorm:4)@concat").layer()
    k = torch.ones(2, 2, 9, 8)
    k[:, 0] *= 5  # large keys go first
    position = torch.arange(9).expand(2, -1).clone()
    position[0] = (position[0] - 2).clamp(min=-1)
    layer.step(torch.randn(2, 2, 9, 8), k, k, position, scale=0.3)
    assert layer.storage.storages[0].length < layer.storage.storages[1].length
    layer.record_past = True
    layer.step(torch.randn(2, 2, 2, 8), k[:, :, :2], k[:, :, :2], scale=0.3)
    layer.crop(-2)
    assert layer.seen.tolist() == [7, 9]
