"""LayerCache: extend, attend, settle, and what leaves it unchanged."""

from __future__ import annotations

import pytest
import torch

import kvkeep.layer.step
from kvkeep.attention import attend
from kvkeep.cache import Cache
from kvkeep.errors import CapacityError, RollbackError, ShapeError, StateError
from kvkeep.layer.settling import Settler
from kvkeep.planes import POSITION, Reach
from kvkeep.spec import CacheSpec
from kvkeep.testing import OracleLayer, check_layer, example_planes, live_tokens

SPECS = ("keep_all", "keep_all@fixed:32", "keep_all@concat", "window:4,sinks=1", "window:6@fixed")


def new(spec="keep_all", **options):
    return CacheSpec.parse(spec).layer(**options)


def kv(n, rows=1, heads=2, dim=4, **options):
    return torch.randn(rows, heads, n, dim, **options), torch.randn(rows, heads, n, dim, **options)


def positions(layer):
    return layer.storage.read()[POSITION][:, 0].tolist()


def test_extend_returns_everything_kept_and_the_new():
    layer = new()
    k, v = kv(3)
    view = layer.extend(k, v)
    assert view.slots == 3
    assert view.dense
    assert view.position.tolist() == [0, 1, 2]
    layer.settle()
    more, w = kv(1)
    view = layer.extend(more, w)
    (segment,) = view.segments
    assert segment.keys(torch.float32).equal(torch.cat([k, more], dim=2))
    assert segment.values(torch.float32).equal(torch.cat([v, w], dim=2))
    assert view.position.tolist() == [3]


def test_the_past_is_not_copied_for_strided_input():
    layer = new()
    layer.extend(*kv(3))
    before = layer.storage.read()["k"].data_ptr()
    k = torch.randn(1, 5, 2, 4).transpose(1, 2)[:, :, ::2]
    assert not k.is_contiguous()
    view = layer.extend(k, k)
    assert view.segments[0].planes["k"].data_ptr() == before
    assert view.segments[0].keys(torch.float32)[:, :, 3:].equal(k)


def test_ragged_rows_count_their_own_tokens():
    layer = new()
    layer.extend(*kv(3, rows=2), torch.tensor([[-1, -1, 0], [0, 1, 2]]))
    assert layer.seen.tolist() == [1, 3]
    assert layer.length == layer.fed == 3
    layer.extend(*kv(2, rows=2))
    assert positions(layer) == [[-1, -1, 0, 1, 2], [0, 1, 2, 3, 4]]
    layer.crop(-4)
    assert layer.seen.tolist() == [0, 1]
    layer.extend(*kv(1, rows=2))
    assert positions(layer) == [[-1, 0], [0, 1]]


def test_next_positions():
    layer = new()
    layer.extend(*kv(2, rows=2), torch.tensor([[-1, 0], [0, 1]]))
    cpu = torch.device("cpu")
    assert layer.next_positions(2, cpu).tolist() == [[1, 2], [2, 3]]
    real = torch.tensor([[True, False], [False, True]])
    assert layer.next_positions(2, cpu, real).tolist() == [[1, -1], [-1, 2]]


def test_a_window_drops_what_no_query_can_reach():
    layer = new("window:3,sinks=1")
    q = torch.randn(1, 2, 1, 4)
    for _ in range(9):
        layer.step(q, *kv(1), scale=1.0)
    assert layer.length == 4
    assert sorted(positions(layer)[0]) == [0, 6, 7, 8]


def test_a_full_window_needs_no_mask_for_one_token():
    layer = new("window:3")
    layer.extend(*kv(3))
    layer.settle()
    assert layer.extend(*kv(1)).dense
    layer.settle()
    assert layer.extend(*kv(2)).reaches == (Reach(3),)


@pytest.mark.parametrize("options", [{"spec": "window:6"}, {"window": 6}], ids=str)
def test_a_first_chunk_one_longer_than_its_window(options):
    layer, oracle = new(**options), OracleLayer(window=6)
    q, (k, v) = torch.randn(1, 4, 7, 4), kv(7)
    out = layer.step(q, k, v, scale=0.5)
    expected = oracle.step(q, k, v, torch.arange(7)[None], scale=0.5)
    torch.testing.assert_close(out, expected.float(), atol=1e-6, rtol=1e-5)


def test_the_ring_takes_a_chunk_of_any_length():
    layer, oracle = new("window:6@fixed"), OracleLayer(reach=Reach(6))
    k, v = kv(50)
    q = torch.randn(1, 4, 50, 4)
    for part in (slice(0, 20), slice(20, 22), slice(22, 50)):
        out = layer.step(q[:, :, part], k[:, :, part], v[:, :, part], scale=0.5)
        place = torch.arange(part.start, part.stop)[None]
        expected = oracle.step(q[:, :, part], k[:, :, part], v[:, :, part], place, scale=0.5)
        torch.testing.assert_close(out, expected.float(), atol=1e-6, rtol=1e-5)
        check_layer(layer, oracle)
    assert layer.stats().capacity == layer.length == 6
    assert layer.storage.reallocations == 0


@pytest.mark.parametrize("spec", SPECS)
def test_rollback_limit_is_honest(spec):
    layer = new(spec)
    layer.extend(*kv(3))
    layer.settle()
    assert layer.rollback_limit == 3
    layer.extend(*kv(9))
    layer.settle()
    limit = 12 if spec.startswith("keep_all") else 0
    assert layer.rollback_limit == limit
    planes = example_planes(layer)
    with pytest.raises(RollbackError, match=f"{limit} can be removed"):
        layer.crop(-limit - 1)
    with pytest.raises(RollbackError, match=r"crop\(-1\)"):
        layer.crop(1)
    assert all(plane.equal(planes[n]) for n, plane in example_planes(layer).items())


@pytest.mark.parametrize(
    ("spec", "window", "tokens", "reason"),
    [
        ("keep_all", None, 10, "9 were fed$"),
        ("keep_all", 4, 2, "9 were fed, and a sliding window of 4 tokens drops the older ones; "),
        ("keep_all+kivi:4,together=4,recent=0", None, 2, "kivi has encoded some; .* int8"),
        ("window:4", None, 2, "policy window evicted some; .* keep_all"),
        ("h2o:16", None, 2, "policy h2o cannot undo a step; .* keep_all"),
    ],
)
def test_what_cannot_be_taken_back_says_why(spec, window, tokens, reason):
    layer = CacheSpec.parse(spec).layer(window=window)
    layer.extend(*kv(9))
    layer.settle()
    with pytest.raises(RollbackError, match=reason) as raised:
        layer.crop(-tokens)
    assert spec.startswith("keep_all") <= ("use keep_all" not in str(raised.value))


@pytest.mark.parametrize("spec", ["window:4", "window:4@fixed", "window:4@concat"])
def test_recording_keeps_what_a_crop_needs(spec):
    layer, oracle = new(spec), OracleLayer(reach=Reach(4))
    layer.record_past = True

    def step(n):
        q, (k, v) = torch.randn(1, 2, n, 4), kv(n)
        place = torch.arange(layer.fed, layer.fed + n)[None]
        out = layer.step(q, k, v, scale=0.5)
        expected = oracle.step(q, k, v, place, scale=0.5)
        torch.testing.assert_close(out, expected.float(), atol=1e-6, rtol=1e-5)

    step(10)
    step(1)
    step(1)
    assert layer.rollback_limit == 12
    layer.crop(-3)
    oracle.crop(-3)
    assert layer.length == 4
    step(5)
    layer.crop(0)
    assert layer.length == 4
    layer.record_past = False
    step(1)
    check_layer(layer, oracle)


def test_the_layers_own_window_limits_any_policy():
    layer, oracle = new("window:8,sinks=3", window=4), OracleLayer(window=4)
    q, (k, v) = torch.randn(1, 2, 20, 4), kv(20)
    out = layer.step(q, k, v, scale=0.5)
    expected = oracle.step(q, k, v, torch.arange(20)[None], scale=0.5)
    torch.testing.assert_close(out, expected.float(), atol=1e-6, rtol=1e-5)
    assert layer.length == 4


@pytest.mark.parametrize("prompt", [1, 12])
def test_sinks_that_the_layers_own_window_has_passed(prompt):
    """Newer tokens take their slots, but the policy's window is as long as before."""
    layer, oracle = new("window:3,sinks=2", window=5), OracleLayer(reach=Reach(3, 2), window=5)
    for n in (prompt, *[1] * 9):
        q, (k, v) = torch.randn(1, 2, n, 4), kv(n)
        place = torch.arange(layer.fed, layer.fed + n)[None]
        out = layer.step(q, k, v, scale=0.5)
        expected = oracle.step(q, k, v, place, scale=0.5)
        torch.testing.assert_close(out, expected.float(), atol=1e-6, rtol=1e-5)


def test_in_order_is_a_view_until_something_moved():
    layer = new("window:3")
    k, v = kv(3)
    view = layer.extend(k, v)
    keys = layer.contents.in_order(view).keys
    assert keys.data_ptr() == view.segments[0].planes["k"].data_ptr()
    layer.settle()
    for token in range(5):
        new_k = torch.full((1, 2, 1, 4), float(token))
        keys = layer.contents.in_order(layer.extend(new_k, new_k)).keys
        layer.settle()
    assert keys[0, 0, :, 0].tolist() == [2, 3, 4]


HELD = ["keep_all", "window:6,sinks=2", "h2o:8", "adakv(h2o:8)", "keep_all@host", "keep_all+kivi"]


@pytest.mark.parametrize("spec", HELD)
def test_what_is_held_by_position(spec):
    """Keys whose elements are their position, and values ten times that, for heads that differ."""
    layer = kvkeep.CacheSpec.parse(spec).layer()
    assert layer.held() is layer.keys is layer.values is None
    at = 0
    for n in (70, 1, 1, 5, 1):
        k = torch.arange(at, at + n, dtype=torch.float32)[None, None, :, None].expand(2, 2, n, 32)
        layer.step(torch.randn(2, 4, n, 32), k, 10 * k, scale=0.01)
        at += n
    keys, values, position = layer.held()[:3]
    assert position.shape[2] == layer.length
    assert position.expand(2, 2, -1).sort().values.equal(layer.positions().sort().values)
    assert (position.diff(dim=2) >= 0).all()
    real = position.clamp(min=0)[..., None].float()  # an empty slot is zero
    torch.testing.assert_close(keys, real.expand_as(keys), atol=1.0, rtol=0.0)  # kivi's codes
    torch.testing.assert_close(values, 10 * real.expand_as(values), atol=1.0, rtol=0.0)
    assert layer.keys.equal(keys)
    assert layer.values.equal(values)


def test_what_is_held_with_padding_and_forks():
    layer = new("keep_all")
    k = torch.arange(4.0)[None, None, :, None].expand(2, 2, 4, 4)
    layer.step(k, k, k, torch.tensor([[-1, -1, 0, 1], [0, 1, 2, 3]]), scale=1.0)
    layer.freeze()
    fork = layer.fork()
    fork.step(k[:, :, :1], k[:, :, :1] + 4, k[:, :, :1] + 4, scale=1.0)
    held = fork.held()
    assert held.position[:, 0].tolist() == [[-1, -1, 0, 1, 2], [0, 1, 2, 3, 4]]
    live = held.position.expand(-1, 2, -1) >= 0
    columns = torch.arange(5.0).expand(2, 2, 5)  # as they were fed
    assert held.keys[..., 0][live].equal(columns[live])
    assert layer.keys.shape == (2, 2, 4, 4)


def test_what_is_held_on_the_host_is_not_overwritten():
    """Layers on the host are read in one place, one after another."""
    cache = Cache(kvkeep.CacheSpec.parse("keep_all@host").layer() for _ in range(3))
    for value, layer in enumerate(cache.layers):
        k = torch.full((1, 2, 3, 4), float(value))
        layer.step(k, k, k, scale=1.0)
    assert [keys[0, 0, 0, 0].item() for keys in [x.keys for x in cache.layers]] == [0, 1, 2]


def test_rows_move_with_what_was_set_aside():
    layer = new("window:2@fixed")
    layer.record_past = True
    k, v = kv(5, rows=2)
    layer.extend(k[:, :, :2], v[:, :, :2])
    layer.extend(k[:, :, 2:], v[:, :, 2:])
    layer.take_rows(torch.tensor([1, 1, 0]))
    layer.crop(-1)
    assert positions(layer) == [[2, 3]] * 3
    assert layer.storage.read()["k"].equal(k[[1, 1, 0], :, 2:4])


def test_take_rows():
    layer = new()
    k, v = kv(2, rows=2)
    layer.extend(k, v, torch.tensor([[-1, 0], [0, 1]]))
    layer.take_rows(torch.tensor([1, 0, 0]))
    assert layer.seen.tolist() == [2, 1, 1]
    assert layer.storage.read()["k"].equal(k[[1, 0, 0]])
    layer.extend(*kv(1, rows=3))
    assert positions(layer) == [[0, 1, 2], [-1, 0, 1], [-1, 0, 1]]


@pytest.mark.parametrize("spec", SPECS)
def test_reset_forgets_the_geometry_too(spec):
    layer = new(spec)
    layer.extend(*kv(3, rows=2), torch.tensor([[-1, 0, 1], [0, 1, 2]]))
    layer.settle()
    layer.reset()
    assert (layer.fed, layer.length, layer.seen.tolist()) == (0, 0, [])
    layer.extend(*kv(2, rows=1, heads=3, dim=8, dtype=torch.float64))
    assert positions(layer) == [[0, 1]]


def test_stats():
    layer = new("keep_all@fixed:8")
    layer.extend(*kv(3, rows=2))
    per_slot = 2 * (2 * 2 * 4 * 4) + 2 * 4  # keys and values, positions; B 2, H 2, D 4
    stats = layer.stats()
    assert (stats.length, stats.capacity, stats.reallocations) == (3, 8, 0)
    assert (stats.live_bytes, stats.nbytes) == (3 * per_slot, 8 * per_slot)


BAD = {
    "three dimensions": (lambda k, v: (k[0], v[0]), "give \\(B, H, n, Dk\\)"),
    "no tokens": (lambda k, v: (k[:, :, :0], v[:, :, :0]), "each at least 1"),
    "keys and values of other lengths": (lambda k, v: (k, v[:, :, :1]), "give"),
    "mixed dtypes": (lambda k, v: (k, v.double()), "use one dtype and device"),
    "mixed devices": (lambda k, v: (k, v.to("meta")), "use one dtype and device"),
    "integers": (lambda k, v: (k.int(), v.int()), "floating-point"),
    "another dtype": (lambda k, v: (k.double(), v.double()), "holds torch.float32"),
    "another device": (lambda k, v: (k.to("meta"), v.to("meta")), "holds .* on cpu"),
    "other heads": (lambda k, v: (k[:, :1], v[:, :1]), "2 heads"),
    "other rows": (lambda k, v: (k[:1], v[:1]), "2 rows.*select"),
    "another width": (lambda k, v: (k[..., :2], v), "width 4"),
    "positions of another shape": (lambda k, v: (k, v, torch.zeros(3, 2).int()), "give integers"),
    "float positions": (lambda k, v: (k, v, torch.zeros(2)), "give integers"),
}


@pytest.mark.parametrize("what", BAD)
@pytest.mark.parametrize("spec", SPECS)
def test_bad_input_changes_nothing(spec, what):
    make, message = BAD[what]
    layer = new(spec)
    layer.extend(*kv(5, rows=2))
    layer.settle()
    stats, planes = layer.stats(), example_planes(layer)
    with pytest.raises(ShapeError, match=message):
        layer.extend(*make(*kv(2, rows=2)))
    assert layer.stats() == stats
    assert all(plane.equal(planes[n]) for n, plane in example_planes(layer).items())


def test_a_full_fixed_cache_changes_nothing():
    layer = new("keep_all@fixed:4")
    layer.extend(*kv(3))
    with pytest.raises(CapacityError, match=r"5 slots needed.*fixed at 4"):
        layer.extend(*kv(2))
    assert (layer.length, layer.fed) == (3, 3)
    layer.extend(*kv(1))


@pytest.mark.parametrize("spec", ["keep_all", "window:4@fixed"])
def test_a_step_whose_attention_fails_changes_nothing(spec, monkeypatch):
    layer = new(spec)
    position = torch.tensor([[-1, 0], [0, 1]])
    layer.step(torch.randn(2, 2, 2, 4), *kv(2, rows=2), position, scale=1.0)
    stats, seen, planes = layer.stats(), layer.seen, example_planes(layer)

    def fail(*_, **__):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(kvkeep.layer.step, "dispatch", fail)
        with pytest.raises(MemoryError):
            layer.step(torch.randn(2, 2, 6, 4), *kv(6, rows=2), scale=1.0)
    assert layer.stats() == stats
    assert layer.seen.equal(seen)
    assert all(plane.equal(planes[n]) for n, plane in example_planes(layer).items())


@pytest.mark.parametrize(
    "q",
    [
        torch.randn(1, 3, 2, 4),
        torch.randn(1, 2, 1, 4),
        torch.randn(1, 2, 2, 5),
        torch.randn(2, 2, 2, 4),
        torch.randn(1, 2, 2, 4).double(),
    ],
)
def test_queries_that_do_not_fit_change_nothing(q):
    layer = new()
    with pytest.raises(ShapeError):
        layer.step(q, *kv(2), scale=1.0)
    assert layer.length == 0


def test_sinks_that_do_not_fit_evict_nothing():
    layer = new("window:4")
    layer.step(torch.randn(1, 2, 4, 4), *kv(4), scale=1.0)
    before = layer.length, layer.rollback_limit
    with pytest.raises(ShapeError, match="one logit per query head"):
        layer.step(torch.randn(1, 2, 1, 4), *kv(1), scale=1.0, sinks=torch.zeros(7))
    assert (layer.length, layer.rollback_limit) == before


@pytest.mark.parametrize("spec", SPECS)
def test_cropped_to_nothing_is_as_new(spec):
    layer = new(spec)
    layer.extend(*kv(3, rows=2))
    layer.crop(-3)
    assert (layer.fed, layer.seen.tolist(), layer.rollback_limit) == (0, [], 0)
    layer.extend(*kv(2, rows=1, heads=3, dim=8, dtype=torch.float64))


def test_gradients_need_concat():
    k, v = kv(2)
    with pytest.raises(StateError, match="@concat"):
        new().extend(k.requires_grad_(), v)
    with torch.no_grad():
        new().extend(k, v)


def test_gradients_through_concat():
    q, (k, v) = torch.randn(1, 2, 5, 4, dtype=torch.float64), kv(5, dtype=torch.float64)

    def run(q, k, v):
        layer = new("keep_all@concat")
        parts = (slice(0, 3), slice(3, 4), slice(4, 5))
        return torch.cat(
            [layer.step(q[:, :, p], k[:, :, p], v[:, :, p], scale=0.5) for p in parts], dim=2
        )

    torch.autograd.gradcheck(run, [x.requires_grad_() for x in (q, k, v)])


def test_three_calls_are_one_step():
    one, three = new("window:3"), new("window:3")
    for n in (4, 1, 2):
        q, (k, v) = torch.randn(1, 4, n, 4), kv(n)
        view = three.extend(k, v)
        out, _ = attend(q, view, scale=0.5)
        three.settle()
        assert out.equal(one.step(q, k, v, scale=0.5))


@pytest.mark.parametrize("codec", ["int8", "int4", "fp8", "kivi"])
def test_codecs_let_no_gradients_through_and_say_so(codec):
    layer = CacheSpec.parse(f"keep_all+{codec}@concat").layer()
    k = torch.randn(1, 1, 4, 16, requires_grad=True)
    with pytest.raises(StateError, match=r"\+plain@concat"):
        layer.extend(k, k)


def test_a_chunk_set_aside_is_a_copy():
    layer = CacheSpec.parse("window:8@fixed:8").layer()
    layer.record_past = True
    k = torch.randn(1, 2, 16, 8)
    layer.extend(k, k)
    layer.settle()
    expected = live_tokens(layer)[0][0][1].clone()
    k.zero_()
    assert live_tokens(layer)[0][0][1].equal(expected)


@pytest.mark.parametrize("text", ["adakv(h2o:6)@concat", "h2o:6@concat", "adakv(knorm:6)"])
def test_modes_may_change_between_steps(text):
    layer = CacheSpec.parse(text).layer()
    for mode in (torch.inference_mode, torch.no_grad, torch.inference_mode, torch.enable_grad):
        with mode():
            for n in (5, 1):
                layer.step(torch.randn(1, 4, n, 16), *kv(n, dim=16), scale=0.25)
    assert max(len(place) for place, _, _ in live_tokens(layer)[0]) >= 6


def test_an_interrupt_after_an_eviction_takes_nothing_back(monkeypatch):
    """What was evicted cannot be restored, so the new tokens stay."""

    def interrupt(self):
        raise KeyboardInterrupt

    layer, whole = new("h2o:8"), new("h2o:8")
    chunks = [(torch.randn(1, 2, n, 4), *kv(n)) for n in (8, 3, 1)]
    for each in (layer, whole):
        each.step(*chunks[0], scale=1.0)
    whole.step(*chunks[1], scale=1.0)
    with monkeypatch.context() as patch:
        patch.setattr(Settler, "pack", interrupt)
        with pytest.raises(KeyboardInterrupt):
            layer.step(*chunks[1], scale=1.0)
    layer.cursor.mend()
    assert layer.fed == 11
    assert layer.positions().equal(whole.positions())
    assert layer.step(*chunks[2], scale=1.0).equal(whole.step(*chunks[2], scale=1.0))
