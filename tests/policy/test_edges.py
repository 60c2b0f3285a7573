"""Scores that are equal or no numbers, rows of padding, and layers with a window of their own."""

from __future__ import annotations

import pytest
import torch

from kvkeep.errors import StateError
from kvkeep.planes import POSITION
from kvkeep.policy import Observation
from kvkeep.spec import CacheSpec
from kvkeep.testing import EXAMPLES, live_tokens

pytestmark = pytest.mark.usefixtures("one_thread")

SCORED = [text for name, text in EXAMPLES.items() if name not in ("keep_all", "window", "kvzip")]
HEADS, DIM = 2, 4


def live(layer):
    position = layer.storage.read()[POSITION]
    return [[sorted(p for p in head if p >= 0) for head in row] for row in position.tolist()]


def tokens(n, rows=1):
    return [torch.randn(rows, HEADS, n, DIM) for _ in range(3)]


@pytest.mark.parametrize("chunk", [1, 20])
@pytest.mark.parametrize("text", [t for t in SCORED if not t.startswith(("random", "snapkv"))])
def test_equal_scores_evict_the_oldest(text, chunk):
    layer = CacheSpec.parse(text).layer()
    for _ in range(0, 20, chunk):
        k = torch.full((1, HEADS, chunk, DIM), 0.5)
        layer.extend(k, k)
        # Each step replaces what was received before, so that sums do not differ by age.
        for name in {"score"} & set(layer.policy.planes):
            scores = layer.storage.read()[name]
            scores.copy_(scores[:, :, -1:].expand_as(scores))
            layer.slots.observed().write(name, scores)
        layer.settle(Observation(torch.ones(1, HEADS, layer.length), queries=k))
    inner = getattr(layer.policy, "inner", layer.policy)
    sinks = inner.sinks
    expected = [*range(sinks), *range(20 - inner.budget + sinks, 20)]
    assert all(head == expected for row in live(layer) for head in row)
    for plane in layer.storage.read().values():
        assert not plane.float().isnan().any()


@pytest.mark.parametrize("text", ["knorm:4", "qvlen:4,recent=1+int8"])
def test_scores_do_not_depend_on_how_tensors_lie(text):
    held = []
    k = torch.randn(3, HEADS, 9, 64)
    for order in ((0, 1, 2, 3), (0, 2, 1, 3), (3, 0, 1, 2)):
        layer = CacheSpec.parse(text).layer()
        there = k.permute(order).contiguous()
        same = there.permute([order.index(axis) for axis in range(4)])
        layer.extend(same, same)
        held.append(layer.storage.read())
    names = {"score", "value_norm", "error"} & set(held[0])
    assert names
    for planes in held[1:]:
        assert all(planes[name].equal(held[0][name]) for name in names)


def test_snapkv_pools_equal_scores_to_less_at_the_ends_only():
    layer = CacheSpec.parse("snapkv:8,window=4,pool=3").layer()
    k = torch.full((1, HEADS, 20, DIM), 0.5)
    layer.extend(k, k)
    layer.settle(Observation(torch.ones(1, HEADS, 20), queries=k))
    assert live(layer) == [[[11, 12, 13, 14, *range(16, 20)]] * HEADS]  # 15 lacks a neighbour


@pytest.mark.parametrize("text", ["h2o:4,recent=1", "vlen:4,recent=1", "qh2o:4,recent=1", "tova:4"])
@pytest.mark.parametrize("count", [1, 3])
def test_mass_that_is_no_number_goes_first(text, count):
    layer = CacheSpec.parse(text).layer()
    k, v, q = tokens(4 + count)
    layer.extend(k, v)
    mass = torch.rand(1, HEADS, 4 + count) + 1
    mass[:, :, 2] = torch.nan
    layer.settle(Observation(mass, queries=q))
    for row in live(layer):
        for head in row:
            assert 2 not in head
            assert len(head) == 4


@pytest.mark.parametrize("text", ["knorm:4", "keydiff:4", "vlen:4,recent=1"])
def test_a_token_that_is_no_number_goes_first_and_changes_no_other(text):
    q, k, v = tokens(7)
    others = [0, 1, 2, 4, 5, 6]
    bad = v if text.startswith("vlen") else k
    bad[:, 0, 3] = torch.nan
    mass = torch.rand(1, HEADS, 7)
    layer, without = (CacheSpec.parse(text).layer() for _ in range(2))
    layer.extend(k, v)
    layer.settle(Observation(mass, queries=q))
    without.extend(k[:, :, others], v[:, :, others])
    without.settle(Observation(mass[:, :, others], queries=q[:, :, others]))
    assert live(layer)[0][0] == [others[i] for i in live(without)[0][0]]


@pytest.mark.parametrize("text", SCORED)
def test_keys_that_are_no_numbers_raise_nothing(text):
    layer = CacheSpec.parse(text).layer()
    for n in (12, 1, 1, 9, 1):
        q, k, v = tokens(n)
        k[:, :, 0] = torch.nan
        v[:, 0, -1] = torch.inf
        layer.step(q, k, v, scale=0.5)
    for row in live(layer):
        assert sum(map(len, row)) == layer.policy.budget * len(row)
        assert all(len(set(head)) == len(head) for head in row)


@pytest.mark.parametrize("chunks", [[5] * 4, [1] * 20])
@pytest.mark.parametrize("text", SCORED)
def test_a_row_of_padding_only(text, chunks):
    both, alone = (CacheSpec.parse(text).layer() for _ in range(2))
    for n in chunks:
        q, k, v = tokens(n, rows=2)
        k[0], v[0], q[0] = torch.nan, torch.nan, torch.nan
        position = torch.stack([torch.full((n,), -1), torch.arange(both.fed, both.fed + n)])
        out = both.step(q, k, v, position, scale=0.5)
        expected = alone.step(q[1:], k[1:], v[1:], scale=0.5)
        torch.testing.assert_close(out[1:], expected, atol=2e-5, rtol=0)
        assert live(both)[0] == [[]] * len(live(both)[0])
        assert live(both)[1] == live(alone)[0]
    assert both.seen.tolist() == [0, 20]


@pytest.mark.parametrize("chunk", [1, 4, 20])
@pytest.mark.parametrize("text", SCORED)
def test_out_of_the_layers_window_goes_first(text, chunk):
    if text.startswith("pyramid"):
        pytest.skip("h2o by another name")
    layer = CacheSpec.parse(text).layer(window=9)
    for _ in range(0, 20, chunk):
        q, k, v = tokens(chunk)
        layer.step(q, k, v, scale=0.5)
        seen = int(layer.seen)
        reach = range(max(0, seen - 8), seen)  # what the next query sees
        for head in live(layer)[0]:
            missing = len(reach) - len(set(head) & set(reach))
            spare = len(head) - len(set(head) & set(reach))
            # Nothing within reach went while something beyond it stayed.
            assert missing == 0 or spare == 0 or layer.policy.ragged
    assert len(reach) == 8


def test_a_layers_window_beats_sinks():
    layer = CacheSpec.parse("knorm:6,sinks=2,recent=1").layer(window=8)
    for _ in range(30):
        q, k, v = tokens(1)
        layer.step(q, k, v, scale=0.5)
    assert all(min(head) >= 30 - 8 for head in live(layer)[0])


def test_adakv_takes_the_oldest_of_equals_however_slots_lie():
    """Keys of two norms: many ties, in a padded batch and alone."""
    for seed in range(10):
        generator = torch.Generator().manual_seed(seed)
        k = torch.ones(1, 2, 24, 8) * torch.randint(1, 3, (1, 2, 24, 1), generator=generator)
        q = torch.randn(2, 2, 24, 8, generator=generator)
        both, alone = (CacheSpec.parse("adakv:0.5(knorm:8)").layer() for _ in range(2))
        position = torch.stack([torch.arange(24) - 5, torch.arange(24)]).clamp(min=-1)
        for part in (slice(0, 12), *(slice(i, i + 1) for i in range(12, 24))):
            pair = torch.cat([k, k])[:, :, part]
            both.step(q[:, :, part], pair, pair, position[:, part], scale=0.3)
            real = position[0, part] >= 0
            own = pair[:1, :, real]
            alone.step(q[:1, :, part][:, :, real], own, own, scale=0.3)
        places = [[sorted(place) for place, _, _ in live_tokens(x)[0]] for x in (both, alone)]
        assert places[0] == places[1]


def test_what_a_policy_lacks_is_named():
    for text, need in (("h2o:8", "mass"), ("expected_attention:8", "queries")):
        layer = CacheSpec.parse(text).layer()
        layer.extend(torch.randn(1, 1, 3, 8), torch.randn(1, 1, 3, 8))
        with pytest.raises(StateError, match=need):
            layer.settle(Observation())
