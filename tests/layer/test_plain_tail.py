"""Codecs of single tokens that leave the newest tokens plain for a while."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kvkeep.errors import StateError
from kvkeep.layer.beginning import begin_with
from kvkeep.layer.layer import LayerCache
from kvkeep.layer.stats import promised_bytes
from kvkeep.spec import CacheSpec
from kvkeep.storage import Growing, buffer
from kvkeep.testing import live_tokens

TEXT = 300


@pytest.fixture
def text() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, heads, TEXT, 32, generator=generator) for heads in (4, 2, 2)]


def made(spec: str) -> LayerCache:
    return CacheSpec.parse(spec).layer(capacity=TEXT)


def fed(layer: LayerCache, text: list[Tensor], stop: int, chunk: int) -> Tensor:
    """The outputs of the text's tokens up to `stop` that the layer was not fed yet."""
    found = []
    while layer.fed < stop:
        at = slice(layer.fed, min(stop, layer.fed + chunk))
        found.append(layer.step(*(x[:, :, at] for x in text), scale=0.2))
    return torch.cat(found, dim=2)


def plain_positions(layer: LayerCache) -> list[int]:
    plain = [segment.position[0, 0] for segment in layer.slots.segments() if segment.plain]
    return sorted(torch.cat(plain).tolist())


@pytest.mark.parametrize("centre", [0, 256])
@pytest.mark.parametrize("chunk", [1, 70])
def test_plain_tokens_are_as_computed(text: list[Tensor], chunk: int, centre: int) -> None:
    layer, exact = made(f"keep_all+int4:recent=1000,centre={centre}"), made("keep_all")
    torch.testing.assert_close(fed(layer, text, TEXT, chunk), fed(exact, text, TEXT, chunk))


def test_first_and_newest_tokens_stay_plain(text: list[Tensor]) -> None:
    layer, exact = made("keep_all+int4:recent=64,sinks=4"), made("keep_all")
    first = fed(layer, text, 200, 200)
    torch.testing.assert_close(first, fed(exact, text, 200, 200))  # a chunk reads its own tokens
    for stop in range(201, TEXT, 7):
        fed(layer, text, stop, 1)
        plain = plain_positions(layer)
        assert plain[:4] == [0, 1, 2, 3]
        assert plain[4:] == list(range(plain[4], stop))
        assert stop - plain[4] == 64
        assert sorted(layer.positions()[0, 0].tolist()) == list(range(stop))


@pytest.mark.parametrize("policy", ["keep_all", "window:64", "h2o:64", "adakv(h2o:64)"])
def test_storage_that_moves_its_slots_holds_the_same(text: list[Tensor], policy: str) -> None:
    layers = [made(f"{policy}+int4:recent=16@{storage}") for storage in ("growing", "concat")]
    for layer in layers:
        fed(layer, text, 150, 150)
        fed(layer, text, 200, 1)
    assert alike(*layers)


@pytest.mark.parametrize("back", [10, 60, 100, 229])
def test_a_crop_reaches_encoded_tokens(text: list[Tensor], back: int) -> None:
    layer, exact = made("keep_all+int4:recent=32,sinks=4"), made("keep_all")
    fed(layer, text, 150, 150)
    fed(layer, text, 230, 1)
    before = dict(zip(*live_tokens(layer)[0][1][:2], strict=True))
    layer.crop(-back)
    assert sorted(layer.positions()[0, 0].tolist()) == list(range(230 - back))
    for position, key in zip(*live_tokens(layer)[0][1][:2], strict=True):
        assert key.equal(before[position])
    expected = fed(exact, text, TEXT, TEXT)[:, :, 230 - back :]
    found = fed(layer, text, TEXT, 9)
    assert float((found - expected).norm() / expected.norm()) < 0.2
    assert sorted(layer.positions()[0, 0].tolist()) == list(range(TEXT))


@pytest.mark.parametrize(
    "spec",
    [
        "adakv(h2o:64)+{}@host",
        "window:64+{}@fixed",
        "h2o:64+{}@fixed",
        "keep_all+{}@fixed",
        "h2o:64+{}@host",
    ],
)
def test_other_layers_encode_tokens_as_they_arrive(text: list[Tensor], spec: str) -> None:
    late, once = made(spec.format("int4:recent=64")), made(spec.format("int4:recent=0,sinks=0"))
    for layer in (late, once):
        fed(layer, text, 100, 100)
    assert fed(late, text, 120, 1).equal(fed(once, text, 120, 1))


def with_drafts(layer: LayerCache, alone: LayerCache, text: list[Tensor], begin: int) -> None:
    """Feed both the same tokens; `layer` is also fed drafts, which are taken back."""
    for one in (layer, alone):
        if one.fed < begin:
            fed(one, text, begin, begin)
    layer.record_past = True
    for stop in range(begin + 1, begin + 80, 3):
        fed(layer, text, stop + 4, 5)
        layer.crop(stop - layer.fed)
    layer.record_past = False
    fed(alone, text, layer.fed, 1)


@pytest.mark.parametrize(
    ("policy", "bounds"),
    [
        ("keep_all", {}),
        ("window:100,sinks=4", {"atol": 1e-4, "rtol": 0}),  # slots move, and weights are rounded
    ],
)
def test_drafts_taken_back_change_nothing(
    text: list[Tensor], policy: str, bounds: dict[str, float]
) -> None:
    layer, alone = (made(f"{policy}+int4:recent=32,sinks=4") for _ in range(2))
    with_drafts(layer, alone, text, 150)
    assert plain_positions(layer) == plain_positions(alone)
    assert alike(layer, alone)
    out, expected = (fed(one, text, TEXT, 1) for one in (layer, alone))
    torch.testing.assert_close(out, expected, **bounds)


def test_drafts_after_a_freeze_change_nothing(text: list[Tensor]) -> None:
    layer, alone = (made("keep_all+int4:recent=32,sinks=4") for _ in range(2))
    fed(layer, text, 150, 150)
    layer.freeze()
    with_drafts(layer, alone, text, 150)
    assert plain_positions(layer) == plain_positions(alone)
    assert alike(layer, alone)


WINDOWS: list[tuple[str, dict[str, Any], int]] = [
    ("window:64", {}, 0),
    ("window:60,sinks=4", {}, 2),
    ("keep_all", {"window": 64}, 0),
    ("window:60,sinks=4", {"window": 64}, 0),
]
"""Windows, and how many of the first tokens a tail of 16 tokens and 2 sinks keeps plain there."""


@pytest.mark.parametrize(("policy", "own", "sinks"), WINDOWS)
def test_the_newest_tokens_of_a_window_stay_plain(
    text: list[Tensor], policy: str, own: dict[str, Any], sinks: int
) -> None:
    layer, exact = (
        CacheSpec.parse(policy + codec).layer(**own) for codec in ("+int4:recent=16,sinks=2", "")
    )
    # A chunk reads its own tokens as they were computed.
    torch.testing.assert_close(fed(layer, text, 100, 100), fed(exact, text, 100, 100))
    for stop in range(101, TEXT, 7):
        out, expected = (fed(one, text, stop, 1) for one in (layer, exact))
        assert float((out - expected).norm() / expected.norm()) < 0.2
        plain = plain_positions(layer)
        assert plain == [*range(sinks), *range(stop - 16, stop)]
        assert torch.equal(*(one.positions().sort().values for one in (layer, exact)))
        policy_of, (key, value) = layer.policy, layer.codecs
        geometry = layer.history.geometry
        assert geometry is not None
        assert layer.stats().live_bytes == promised_bytes(policy_of, key, value, stop, geometry)
    assert layer.slots.blocks.storage.reallocations < 8


def test_a_small_window_keeps_less_than_half_of_its_tokens_plain(text: list[Tensor]) -> None:
    layer = made("window:9,sinks=3+int4")
    fed(layer, text, 100, 40)
    fed(layer, text, 130, 1)
    assert plain_positions(layer) == [0, 1, 128, 129]


def slow(*policies: str) -> list[Any]:
    return [pytest.param(policy, marks=pytest.mark.slow) for policy in policies]


BUDGETS = [
    *("h2o:64", "h2o:25%", "knorm:64", "tova:64", "random:40", "snapkv:64,window=8", "vlen:64"),
    *("adakv(h2o:64)", "adakv:0.6(h2o:25%)", "adakv:0(knorm:64)"),
]
"""Policies whose evicted slots are encoded, all with a tail of 16 and 4 tokens."""


def budgeted(policy: str, centre: int = 256) -> LayerCache:
    return made(f"{policy}+int4:recent=16,sinks=4,centre={centre}")


def holding(layer: LayerCache) -> list[list[dict[int, Tensor]]]:
    """By row and head: position -> its key and value."""
    return [
        [{p: torch.cat([k, v]) for p, k, v in zip(*head, strict=True)} for head in row]
        for row in live_tokens(layer)
    ]


def alike(one: LayerCache, other: LayerCache, row: int = 0) -> bool:
    """Whether a layer of one row holds the same codes and plain tokens as a row of another layer.

    Decoding rotates in float64, and its last bits depend on how many tokens are decoded together.
    """
    pairs = zip(holding(one)[0], holding(other)[row], strict=True)
    return all(
        a.keys() == b.keys() and all(torch.allclose(a[p], b[p], rtol=0, atol=1e-12) for p in a)
        for a, b in pairs
    )


@pytest.mark.parametrize("policy", BUDGETS)
def test_under_a_budget_the_first_and_the_newest_tokens_are_plain(
    text: list[Tensor], policy: str
) -> None:
    layer, exact = budgeted(policy), made(policy)
    first = fed(layer, text, 150, 150)
    torch.testing.assert_close(first, fed(exact, text, 150, 150))  # a chunk reads its own tokens
    before = holding(layer)[0]
    for stop in (151, 152, 190, 210):
        fed(layer, text, stop, 1)
        assert plain_positions(layer) == [*range(4), *range(stop - 16, stop)]
        assert layer.slots.surplus(layer.policy.at(stop).budget) == 0
        geometry = layer.history.geometry
        codecs = layer.key_codec, layer.value_codec
        assert layer.stats().live_bytes == promised_bytes(layer.policy, *codecs, stop, geometry)
    coded = [p for p in before[0] if 4 <= p < 134]
    for earlier, now in zip(before, holding(layer)[0], strict=True):
        assert all(now[p].equal(earlier[p]) for p in coded if p in earlier and p in now)


@pytest.mark.parametrize("policy", ["h2o:{}", "adakv(h2o:{})"])
@pytest.mark.parametrize("budget", [2, 9, 20])
def test_at_most_half_of_a_budget_is_plain(text: list[Tensor], policy: str, budget: int) -> None:
    layer = budgeted(policy.format(budget))
    fed(layer, text, 60, 7)
    fed(layer, text, 90, 1)
    assert len(plain_positions(layer)) == budget // 2
    assert layer.slots.surplus(budget) == 0


@pytest.mark.parametrize("floor", [0.0, 0.5, 1.0])
def test_each_head_keeps_its_floor_besides_plain_tokens(text: list[Tensor], floor: float) -> None:
    layer = budgeted(f"adakv:{floor}(knorm:64,recent=0)")
    layer.plans = False
    text[1][:, 0] *= 3  # knorm evicts keys of large norms first
    fed(layer, text, 150, 150)
    fed(layer, text, TEXT, 1)
    heads = [len(head) for head in holding(layer)[0]]
    assert sum(heads) == 2 * 64
    assert heads[0] == max(20, int(64 * floor))


@pytest.mark.parametrize("policy", ["knorm:64", "random:40", "adakv(knorm:64)"])
def test_chunks_keep_what_single_tokens_keep(text: list[Tensor], policy: str) -> None:
    layers = [budgeted(policy, centre=0) for _ in range(3)]
    for layer, chunk in zip(layers, (1, 7, 180), strict=True):
        fed(layer, text, 180, chunk)
    assert alike(layers[0], layers[1])
    assert alike(layers[0], layers[2])


@pytest.mark.usefixtures("one_thread")  # threads divide the slots of a head by the heads of a call
@pytest.mark.parametrize(
    "policy",
    [
        *("keep_all", "h2o:25%", "snapkv:64,window=8", "adakv:0.6(h2o:25%)", "kvzip:50%"),
        # layer/test_native_step.py has the others' steps, with a shorter text.
        *slow("h2o:64", "knorm:64", "tova:64", "random:40", "vlen:64", "qh2o:64", "qvlen:64"),
        *slow("keydiff:64", "adakv(h2o:64)", "adakv(qh2o:64)", "adakv(keydiff:64)"),
    ],
)
def test_native_steps_are_those_of_the_reference(text: list[Tensor], policy: str) -> None:
    native, plain = budgeted(policy), budgeted(policy)
    plain.plans = False
    for layer in (native, plain):
        fed(layer, text, 100, 100)
    assert fed(native, text, 200, 1).equal(fed(plain, text, 200, 1))
    assert native.plan.ready()
    assert alike(native, plain)
    for layer in (native, plain):
        layer.restore(layer.state().copy())
        layer.reset()
        fed(layer, text, 70, 1)
    assert alike(native, plain)


@pytest.mark.skipif(buffer.LIBRARY is None, reason="tensor operations read one segment")
@pytest.mark.parametrize("policy", ["h2o:64", "knorm:64", "snapkv:64,window=8"])
def test_chunks_beyond_a_budget_need_no_room_of_their_own(
    text: list[Tensor], policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, roomy = budgeted(policy), budgeted(policy)
    found = fed(layer, text, TEXT, 90)
    monkeypatch.setattr(Growing, "make_room", lambda storage, slots: True)
    assert found.equal(fed(roomy, text, TEXT, 90))
    assert alike(layer, roomy)
    several = roomy.slots.blocks.storage.reallocations
    assert layer.slots.blocks.storage.reallocations <= 1 < several


@pytest.mark.parametrize(
    ("policy", "plans"),
    [
        *(("h2o:64", True), ("h2o:64", False), ("knorm:64", True), ("snapkv:64,window=8", True)),
        ("adakv(h2o:64)", True),
    ],
)
def test_rows_with_padding_are_as_alone(text: list[Tensor], policy: str, plans: bool) -> None:
    starts = (0, 37, 190)
    alone, together = [budgeted(policy, centre=0) for _ in starts], budgeted(policy, centre=0)
    together.plans = plans
    place = torch.arange(TEXT) - torch.tensor(starts)[:, None]
    rows = [x.expand(len(starts), -1, -1, -1) for x in text]
    at = 0
    for n in (200, *[1] * 25, 3, *[1] * 22):
        part = slice(at, at + n)
        tokens = [x[:, :, part] for x in rows]
        out = together.step(*tokens, place[:, part].clamp(min=-1), scale=0.2)
        for row, (start, layer) in enumerate(zip(starts, alone, strict=True)):
            own = slice(max(start, at), at + n)
            expected = layer.step(*(x[:, :, own] for x in text), scale=0.2)
            found = out[row : row + 1, :, n - expected.shape[2] :]
            torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)
        at += n
    assert all(alike(layer, together, row) for row, layer in enumerate(alone))


@pytest.mark.parametrize(
    "policy",
    [
        *("h2o:25%", "random:40", "snapkv:64,window=8", "adakv:0.6(h2o:25%)"),
        # They differ in their scores, which drafts do not change.
        *slow("h2o:64", "knorm:64", "tova:64", "vlen:64", "adakv(h2o:64)", "adakv:0(knorm:64)"),
    ],
)
def test_under_a_budget_drafts_taken_back_change_nothing(text: list[Tensor], policy: str) -> None:
    layer, alone = budgeted(policy), budgeted(policy)
    with_drafts(layer, alone, text, 90)
    assert alike(layer, alone)
    torch.testing.assert_close(fed(layer, text, 190, 1), fed(alone, text, 190, 1))


@pytest.mark.parametrize("policy", ["h2o:64", "knorm:64", "adakv(h2o:64)", "kvzip:50%"])
def test_under_a_budget_forks_and_copies_go_on_alike(text: list[Tensor], policy: str) -> None:
    layer = budgeted(policy)
    fed(layer, text, 150, 150)
    copy = budgeted(policy)
    copy.restore(layer.state().copy())
    layer.freeze()
    forks = [layer.fork() for _ in range(2)]
    expected = fed(copy, text, 220, 1)
    for fork in forks:
        torch.testing.assert_close(fed(fork, text, 220, 1), expected)
        assert alike(fork, copy)
    assert layer.fed == 150


@pytest.mark.parametrize("back", [1, 12, 40])
def test_a_crop_before_the_first_eviction_is_exact(text: list[Tensor], back: int) -> None:
    layer, alone = budgeted("knorm:200"), budgeted("knorm:200")
    fed(layer, text, 90, 90)
    fed(layer, text, 150, 1)
    before = holding(layer)[0][0]
    layer.crop(-back)
    assert {p: x for p, x in before.items() if p < 150 - back}.keys() == holding(layer)[0][0].keys()
    assert all(x.equal(before[p]) for p, x in holding(layer)[0][0].items())
    fed(layer, text, TEXT, 9)
    fed(alone, text, TEXT, 9)
    assert layer.length == alone.length == 200


@pytest.mark.parametrize("policy", ["window:64", "knorm:64", "adakv(knorm:64)", "kvzip:50%"])
def test_a_layer_begins_with_a_text_as_with_a_chunk(text: list[Tensor], policy: str) -> None:
    stored = made("keep_all")
    layer, chunk = (budgeted(policy, centre=0) for _ in range(2))
    fed(stored, text, 100, 100)
    begin_with(layer, stored)
    fed(chunk, text, 110, 110)
    fed(layer, text, 110, 10)
    assert alike(layer, chunk)


def test_an_eviction_that_fails_is_noticed(
    text: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = budgeted("h2o:64")
    fed(layer, text, 100, 100)
    monkeypatch.setattr(type(layer.slots.blocks), "evict", lambda *_: 1 / 0)
    layer.plans = False
    with pytest.raises(ZeroDivisionError):
        fed(layer, text, 101, 1)
    with pytest.raises(StateError, match="interrupted or failed"):
        fed(layer, text, 102, 1)
