"""Cases that were once wrong: runs in parts, codecs as objects, rows, padding, gradients."""

from __future__ import annotations

import pytest
import torch

from kvkeep.attention import Options, Segment, View, native, reference
from kvkeep.codec import Int8, Kivi, Plain
from kvkeep.errors import ShapeError, SpecError, StateError
from kvkeep.layer.layer import LayerCache
from kvkeep.planes import POSITION
from kvkeep.policy import KeepAll, Observation, Pyramid, Scored
from kvkeep.policy.h2o import H2O
from kvkeep.policy.ranking import Protection, least_worthy
from kvkeep.spec import CacheSpec
from kvkeep.storage import Growing
from kvkeep.testing import live_tokens


@pytest.mark.skipif(not native.available, reason=native.reason)
@pytest.mark.parametrize("threads", [2, 16])
@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize(("n", "past"), [(200, 80), (512, 0), (1500, 0), (600, 100)])
def test_mass_of_a_chunk_longer_than_its_past(threads, heads, n, past):
    q = torch.randn(1, heads * 2, n, 32)
    k, v = torch.randn(2, 1, heads, past + n, 32)
    place = torch.arange(past + n, dtype=torch.int32)
    segment = Segment({"k": k, "v": v, POSITION: place.view(1, 1, -1)}, Plain(), Plain())
    view = View((segment,), place[past:], ragged=False)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        out, mass = native.run(q, view, Options(0.2, need_mass=True))
    finally:
        torch.set_num_threads(before)
    expected, expected_mass = reference.run(q, view, Options(0.2, need_mass=True))
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(mass, expected_mass, atol=1e-4, rtol=1e-4)


def fed(layer, n, rows=1, heads=2, position=None):
    for size in n:
        q, k, v = (torch.randn(rows, count, size, 16) for count in (2 * heads, heads, heads))
        layer.step(q, k, v, position, scale=0.25)
    return layer


def test_codecs_given_as_objects_serve_keys_and_values_apart():
    layer = LayerCache(KeepAll(), Int8(), Int8(), Growing())
    assert layer.value_codec == Int8(hadamard=False)
    spec = CacheSpec(KeepAll(), Int8(), Int8())
    assert CacheSpec.parse(str(spec)) == spec


def test_a_score_shared_by_heads_is_that_of_each():
    position = torch.arange(6, dtype=torch.int32).expand(2, 3, 6).contiguous()
    score = torch.rand(2, 1, 6)
    seen = Observation(newest=5)
    found = least_worthy(score, {POSITION: position}, seen, Protection(), 2)
    assert found.equal(score.argsort(dim=2)[:, :, :2].expand(-1, 3, -1))


def test_victims_of_another_type():
    layer = fed(CacheSpec.parse("keep_all").layer(), [6])
    for wrong in (
        torch.tensor([[[1]]], dtype=torch.int32),
        torch.zeros(3, 1, 1, dtype=torch.int64),
    ):
        with pytest.raises((ShapeError, RuntimeError)):
            layer.storage.evict(wrong)
    assert layer.length == 6


@pytest.mark.parametrize("codec", ["int8", "int4", "fp8", "kivi"])
def test_codecs_let_no_gradients_through_and_say_so(codec):
    layer = CacheSpec.parse(f"keep_all+{codec}@concat").layer()
    k = torch.randn(1, 1, 4, 16, requires_grad=True)
    with pytest.raises(StateError, match=r"\+plain@concat"):
        layer.extend(k, k)


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


@pytest.mark.parametrize("storage", ["concat", "growing"])
def test_kivi_takes_rows_while_its_tail_is_empty(storage):
    layer = CacheSpec.parse(f"keep_all+kivi:4,together=4,recent=0@{storage}").layer()
    fed(layer, [8], rows=2)
    layer.take_rows(torch.tensor([1]))
    fed(layer, [3])
    assert layer.length == 11


def test_kivi_encodes_after_each_crop_while_recording():
    layer = CacheSpec.parse("keep_all+kivi:4,together=4,recent=4").layer()
    layer.record_past = True
    for _ in range(5):
        fed(layer, [9])
        layer.crop(-1)
    assert layer.storage.length < 8


def test_kivi_is_not_widened_by_padding():
    codec = "keep_all+kivi:4,together=8,recent=0"
    both, alone = (CacheSpec.parse(codec).layer() for _ in range(2))
    k = torch.randn(1, 1, 16, 16)
    padded = torch.cat([torch.full((1, 1, 8, 16), 1e3), k], dim=2)
    position = torch.arange(24)[None] - 8
    both.extend(padded, padded, position.clamp(min=-1))
    both.settle()
    alone.extend(k, k)
    alone.settle()
    ours, expected = (live_tokens(x)[0][0] for x in (both, alone))
    assert ours[0] == expected[0]
    torch.testing.assert_close(ours[1], expected[1])


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
            fed(layer, [5, 1])
    assert max(len(place) for place, _, _ in live_tokens(layer)[0]) >= 6


def test_what_a_policy_lacks_is_named():
    for text, need in (("h2o:8", "mass"), ("expected_attention:8", "queries")):
        layer = CacheSpec.parse(text).layer()
        layer.extend(torch.randn(1, 1, 3, 8), torch.randn(1, 1, 3, 8))
        with pytest.raises(StateError, match=need):
            layer.settle(Observation())


@pytest.mark.parametrize(
    "text",
    [
        "random:8,seed=99999999999",
        "knorm:8,keep_from=1,keep_to=4294967296",
        "window:8,keep_to=4294967296",
    ],
)
def test_numbers_that_do_not_fit(text):
    with pytest.raises(SpecError):
        CacheSpec.parse(text)


def test_widths_that_do_not_fit_raise_before_anything_is_held():
    layer = LayerCache(KeepAll(), Kivi(2, together=4), Kivi(2, together=4), Growing())
    with pytest.raises(ShapeError, match="width is 6"):
        layer.extend(torch.randn(1, 1, 1, 6), torch.randn(1, 1, 1, 6))
    assert layer.length == layer.fed == 0


def test_a_pyramid_of_one_layer_is_its_policy():
    layer = fed(LayerCache(Pyramid(H2O(8)), Plain(), Plain(), Growing()), [20])
    assert layer.length == 8
    assert isinstance(layer.policy, Scored)
