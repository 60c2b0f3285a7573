"""Keys with a large constant part: centres take it out of codes, and attention puts it back."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvkeep.attention import Centre, Rotation, Segment, View, attend
from kvkeep.attention.centre import Asked, Near, Turns, measured
from kvkeep.codec import Int4
from kvkeep.codec.plain import Plain
from kvkeep.layer.beginning import begin_with
from kvkeep.layer.layer import LayerCache
from kvkeep.planes import POSITION
from kvkeep.rotary import Rotary
from kvkeep.spec import CacheSpec
from kvkeep.testing import live_tokens

HEADS, GROUP, WIDTH = 2, 2, 32
BIAS = 50.0

ROTARIES = {
    "whole": Rotary(100.0 ** (-torch.arange(0, WIDTH, 2) / WIDTH)),
    # The library computes 8 of these frequencies by powers of the distance.
    "slow": Rotary(10_000.0 ** (-torch.arange(0, WIDTH, 2) / WIDTH)),
    "partial": Rotary(100.0 ** (-torch.arange(0, 16, 2) / 16)),
    "interleaved": Rotary(-(100.0 ** (-torch.arange(0, WIDTH, 2) / WIDTH)), interleaved=True),
    "none": None,
}


def tokens(
    count: int,
    rotary: Rotary | None,
    rows: int = 1,
    seed: int = 0,
    start: int = 0,
    bias: float = BIAS,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of `count` tokens; keys are a constant of each head plus a little,
    rotated for the positions from `start` on. The channels of a head are of different sizes, small
    in queries where they are large in keys."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(rows, heads, count, WIDTH, generator=generator)
        for heads in (HEADS * GROUP, HEADS, HEADS)
    )
    sizes = pairs_of_two(rotary).repeat_interleave(GROUP, dim=1)
    q, k = q / sizes, k * sizes[:, ::GROUP]
    # Each row has another constant.
    k += bias * torch.randn(rows, HEADS, 1, WIDTH, generator=torch.Generator().manual_seed(9))
    if rotary is None:
        return q, k, v
    place = torch.arange(start, start + count)
    return rotary.turn(q, place), rotary.turn(k, place), v


def pairs_of_two(rotary: Rotary | None, seed: int = 5) -> Tensor:
    """Powers of 2 from 1/8 to 8, (1, HEADS, 1, WIDTH), equal for both channels that a rotary
    embedding turns together."""
    generator = torch.Generator().manual_seed(seed)
    powers = torch.randint(-3, 4, (1, HEADS, 1, WIDTH), generator=generator)
    if rotary is not None:
        turns = Turns.of(rotary, WIDTH, 1, powers.device)
        first, _ = turns.paired(powers)
        both = turns.unpaired(first, first)
        powers = torch.cat([both, powers[..., both.shape[-1] :]], dim=-1)
    return powers.float().exp2()


def random_centre(rotary: Rotary | None, rows: int, positions: int) -> Centre:
    scale = pairs_of_two(rotary, seed=6).expand(rows, -1, -1, -1)
    turns = Turns.of(rotary, WIDTH, positions, scale.device)
    return Centre(torch.cat([torch.randn(rows, HEADS, 1, WIDTH), scale], dim=2), turns)


def made(spec: str, rotary: Rotary | None) -> LayerCache:
    return CacheSpec.parse(spec).layer(rotary=rotary)


def fed(layer: LayerCache, q: Tensor, k: Tensor, v: Tensor, chunks: list[int]) -> Tensor:
    """The outputs of a text fed in chunks."""
    parts = [x.split(chunks, dim=2) for x in (q, k, v)]
    return torch.cat(
        [layer.step(*part, scale=WIDTH**-0.5) for part in zip(*parts, strict=True)], dim=2
    )


def apart(x: Tensor, y: Tensor) -> float:
    return float((x - y).norm() / y.norm())


@pytest.mark.parametrize("kind", ROTARIES)
def test_a_large_constant_costs_no_precision(kind: str) -> None:
    rotary, chunks = ROTARIES[kind], [40, 1, 1, 20, 1]
    text = tokens(sum(chunks), rotary)
    exact = fed(made("keep_all", rotary), *text, chunks)
    assert apart(fed(made("keep_all+int4@fixed:64", rotary), *text, chunks), exact) < 0.15
    assert apart(fed(made("keep_all+int4:centre=0@fixed:64", rotary), *text, chunks), exact) > 0.3


@pytest.mark.parametrize("backend", ["native", "sdpa", "reference"])
@pytest.mark.parametrize("kind", ROTARIES)
def test_attention_adds_the_centre_to_keys(backend: str, kind: str) -> None:
    rotary = ROTARIES[kind]
    q, k, v = tokens(90, rotary, rows=2)
    position = torch.randperm(90, generator=torch.Generator().manual_seed(1)).int()
    q, k = q[:, :, -3:], k[:, :, position.long()]  # as after evictions: not in order
    centre = random_centre(rotary, 2, 90)
    place = position.view(1, 1, -1).expand(2, 1, -1)
    lacking = {"k": centre.without(k, position), "v": v, POSITION: place}
    segment = Segment(lacking, Plain(), Plain())
    view = View((segment,), torch.full((3,), 89, dtype=torch.int32))
    whole = view._replace(segments=(segment._replace(planes={**lacking, "k": k}),))
    options = {"scale": 0.02, "sinks": torch.randn(HEADS * GROUP)}
    found, _ = attend(q, view, backend=backend, centre=centre, **options)
    expected, _ = attend(q.double(), double(whole), backend="reference", **options)
    torch.testing.assert_close(found, expected.float(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("queries", [1, 9])
@pytest.mark.parametrize("step", [1, 3, 223])
@pytest.mark.parametrize("sorted_", [True, False])
def test_native_attention_adds_the_centre_at_any_positions(
    queries: int, step: int, sorted_: bool
) -> None:
    rotary, slots = ROTARIES["slow"], 170
    assert rotary is not None
    q, k, v = tokens(slots, None)
    order = torch.arange(slots)
    if not sorted_:  # as where the newest tokens lie in the places of evicted ones
        order[::7] = order[::7].flip(0)
    position = (4070 + step * order).int()
    last = int(position.max())
    q = rotary.turn(q[:, :, :queries], torch.tensor([last] * queries))
    centre = random_centre(rotary, 1, last + 1)
    assert centre.turns.near.rows == 12
    planes = {"k": rotary.turn(k, position), "v": v, POSITION: position.expand(1, HEADS, -1)}
    lacking = {**planes, "k": centre.without(planes["k"], position)}
    view = View((Segment(lacking, Plain(), Plain()),), torch.full((queries,), last).int())
    whole = view._replace(segments=(view.segments[0]._replace(planes=planes),))
    found, _ = attend(q, view, backend="native", centre=centre, scale=0.02)
    expected, _ = attend(q.double(), double(whole), backend="reference", scale=0.02)
    torch.testing.assert_close(found, expected.float(), atol=1e-4, rtol=1e-4)


def test_frequencies_in_any_order_have_a_row_each() -> None:
    frequencies = 10_000.0 ** (-torch.arange(0, WIDTH, 2).double() / WIDTH)
    assert Near.of(frequencies.flip(0), torch.device("cpu")).rows == WIDTH // 2


def double(view: View) -> View:
    planes = {n: p if n == POSITION else p.double() for n, p in view.segments[0].planes.items()}
    return view._replace(segments=(view.segments[0]._replace(planes=planes),))


def test_a_moved_run_keeps_its_centre() -> None:
    rotary, by = ROTARIES["whole"], 70
    assert rotary is not None
    q, k, v = tokens(20, rotary)
    centre = random_centre(rotary, 1, 90)
    at = torch.arange(20, dtype=torch.int32).view(1, 1, -1)
    planes = {"k": centre.without(k, at), "v": v, POSITION: at + by}
    rotation = Rotation(by, rotary.inv_freq)
    view = View((Segment(planes, Plain(), Plain(), rotation),), torch.tensor([99]))
    moved = {"k": rotary.turn(k, torch.tensor(by)), "v": v, POSITION: at + by}
    expected, _ = attend(
        q[:, :, :1], View((Segment(moved, Plain(), Plain()),), view.position), scale=0.02
    )
    for backend in ("native", "sdpa", "reference"):
        found, _ = attend(q[:, :, :1], view, scale=0.02, centre=centre, backend=backend)
        # A turn of rounded cosines differs from rounded cosines of the sum.
        torch.testing.assert_close(found, expected, atol=5e-3, rtol=5e-3)


@pytest.mark.parametrize(
    "spec", ["h2o:24+int4", "keydiff:24+int4", "window:24+int4", "adakv(h2o:24)+int4"]
)
def test_policies_see_whole_keys(spec: str) -> None:
    rotary, chunks = ROTARIES["whole"], [40, 1, 20, 1, 1]
    text = tokens(sum(chunks), rotary)
    layer, exact = made(spec, rotary), made(spec.replace("int4", "plain"), rotary)
    assert apart(fed(layer, *text, chunks), fed(exact, *text, chunks)) < 0.5
    for place, keys, _ in live_tokens(layer)[0]:
        head = next(h for h in range(HEADS) if apart(keys, text[1][0, h, place].double()) < 0.02)
        assert apart(keys, text[1][0, head, place].double()) < 0.02
    kept = [[sorted(place) for place, _, _ in live_tokens(x)[0]] for x in (layer, exact)]
    if spec.startswith("window"):
        assert kept[0] == kept[1]


@pytest.mark.parametrize(
    ("spec", "turned"),
    [
        *(("keydiff:40+int4:recent=6,sinks=2", turned) for turned in ROTARIES),  # a plain tail
        ("keydiff:40,sinks=2+int4/int8", "partial"),
        ("keydiff:40+int5:hadamard=0/int8", "whole"),
        ("adakv(keydiff:40)+int4:recent=6,sinks=2", "interleaved"),
    ],
)
def test_native_steps_compare_whole_keys(spec: str, turned: str) -> None:
    rotary = ROTARIES[turned]
    chunks = [60, *[1] * 90]
    text = tokens(sum(chunks), rotary, bias=1.0)
    native, parts = made(spec, rotary), made(spec, rotary)
    parts.plans = False
    for layer in (native, parts):
        fed(layer, *text, chunks)
    assert native.plan is not None
    assert native.plan.ready()
    assert native.positions().equal(parts.positions())


def test_changes_of_a_layer_keep_its_centre() -> None:
    rotary = ROTARIES["whole"]
    q, k, v = tokens(60, rotary, rows=2)
    layer = made("keep_all+int4", rotary)
    fed(layer, q[:, :, :50], k[:, :, :50], v[:, :, :50], [40, 10])
    layer.freeze()
    restored, fork = made("keep_all+int4", rotary), layer.fork()
    restored.restore(layer.state().copy())
    layer.crop(-15)
    layer.take_rows(torch.tensor([1, 0]))
    layer.take_rows(torch.tensor([1, 0]))
    fed(layer, q[:, :, 35:50], k[:, :, 35:50], v[:, :, 35:50], [15])
    chunk = [x[:, :, 50:] for x in (q, k, v)]
    outputs = [fed(x, *chunk, [1] * 10) for x in (layer, restored, fork)]
    for out in outputs[1:]:
        torch.testing.assert_close(out, outputs[0], atol=2e-3, rtol=2e-3)
    for row, heads in enumerate(live_tokens(layer)):
        for head, (place, keys, _) in enumerate(heads):
            assert apart(keys, k[row, head, place].double()) < 0.02


def test_rows_that_share_codes_have_a_centre_each() -> None:
    """Their keys then have more rows than their values."""
    rotary, rows = ROTARIES["whole"], 3
    layer = made("keep_all+int4:recent=0,sinks=0/fp8", rotary)
    fed(layer, *tokens(40, rotary), [40])
    layer.freeze()
    several = layer.fork()
    several.take_rows(torch.zeros(rows, dtype=torch.int64))
    held = several.held()
    assert held is not None
    assert [len(x) for x in held[:3]] == [rows] * 3
    (alone,) = live_tokens(layer)
    for heads in live_tokens(several):
        for (place, keys, values), (own, own_keys, own_values) in zip(alone, heads, strict=True):
            assert place == own
            assert keys.equal(own_keys)
            assert values.equal(own_values)
    q, k, v = tokens(1, rotary, rows=rows, seed=1, start=40)
    out = fed(several, q, k, v, [1])
    for row in range(rows):
        expected = fed(layer.fork(), *(x[row : row + 1] for x in (q, k, v)), [1])
        torch.testing.assert_close(out[row : row + 1], expected, atol=1e-3, rtol=1e-3)


def test_a_layer_begins_with_whole_keys() -> None:
    rotary = ROTARIES["whole"]
    q, k, v = tokens(60, rotary)
    spec = "keep_all+int4:recent=0,sinks=0"
    text, layer, alone = (made(x, rotary) for x in ("keep_all", spec, spec))
    fed(text, q[:, :, :50], k[:, :, :50], v[:, :, :50], [50])
    alone.extend(k[:, :, :50], v[:, :, :50], None)  # without queries, so with scales of 1
    alone.settle()
    begin_with(layer, text)
    again = made("h2o:80+int4:recent=0,sinks=0", rotary)
    begin_with(again, layer)  # codes are shared, so their centre is too
    chunk = [x[:, :, 50:] for x in (q, k, v)]
    out, expected = (fed(x, *chunk, [9, 1]) for x in (layer, alone))
    torch.testing.assert_close(out, expected, atol=1e-4, rtol=1e-4)
    assert again.history.centre is not None
    assert again.history.centre.equal(layer.history.centre)
    assert apart(fed(again, *chunk, [9, 1]), expected) < 0.1


def test_a_mean_needs_tokens() -> None:
    turns = Turns.of(None, WIDTH, 9, torch.device("cpu"))
    k = torch.full((2, HEADS, 14, WIDTH), 3.0)
    position = torch.stack([torch.arange(14), torch.arange(-4, 10).clamp(min=-1)])
    found = measured(k, position, 256, turns).held[:, :, 0]
    assert bool((found[0] == 3).all())
    assert bool((found[1] == 0).all())  # six tokens after the first four
    k[0, 0, 7, 5] = torch.inf
    found = measured(k, position, 256, turns).held[:, :, 0]
    assert bool((found[0, 0] == 0).all())
    assert bool((found[0, 1] == 3).all())


def test_padding_changes_no_centre() -> None:
    rotary = ROTARIES["whole"]
    _, k, _ = tokens(30, rotary)
    padded = torch.cat([torch.randn(1, HEADS, 5, WIDTH), k], dim=2)
    turns = Turns.of(rotary, WIDTH, 30, k.device)
    own, beside = torch.arange(30), torch.arange(-5, 30).clamp(min=-1)
    found, expected = measured(padded, beside, 20, turns), measured(k, own, 20, turns)
    torch.testing.assert_close(found.held, expected.held)


@pytest.mark.parametrize("rotary", ROTARIES.values(), ids=ROTARIES.keys())
def test_scales_balance_keys_and_queries(rotary: Rotary | None) -> None:
    q, k, _ = tokens(200, rotary)
    turns = Turns.of(rotary, WIDTH, 200, k.device)
    place = torch.arange(200)
    centre = measured(k, place, 256, turns, Asked(q, place))
    assert float((centre.scale / pairs_of_two(rotary)).log2().abs().max()) <= 1
    later = measured(k, place, 256, turns, Asked(q[:, :, 190:], place[190:]))
    assert float((centre.scale / later.scale).log2().abs().max()) <= 1
    assert bool(measured(k, place, 256, turns).scale.eq(1).all())
    empty = measured(torch.zeros_like(k), place, 256, turns, Asked(torch.zeros_like(q), place))
    assert bool(empty.scale.eq(1).all())


def test_scaled_codes_are_more_precise() -> None:
    rotary = ROTARIES["whole"]
    q, k, v = tokens(200, rotary, bias=0.0)
    exact = fed(made("keep_all", rotary), q, k, v, [190, 10])[:, :, 190:]
    spec = "keep_all+int4:recent=0,sinks=0/plain"
    scaled, text, bare = (made(x, rotary) for x in (spec, "keep_all", spec))
    found = fed(scaled, q, k, v, [190, 10])[:, :, 190:]
    fed(text, q[:, :, :190], k[:, :, :190], v[:, :, :190], [190])
    begin_with(bare, text)  # of which no queries are known
    rest = fed(bare, q[:, :, 190:], k[:, :, 190:], v[:, :, 190:], [10])
    assert apart(found, exact) < apart(rest, exact) / 2


@pytest.mark.parametrize("between", ["", "saved", "forked", "rows", "failed", "cropped"])
@pytest.mark.parametrize("policy", ["keep_all", "keydiff:180"])
def test_plain_keys_wait_for_queries(policy: str, between: str) -> None:
    """As if they had been fed with the queries of the next chunk."""
    rotary, spec = ROTARIES["whole"], f"{policy}+int4:recent=8,sinks=2/int6:recent=8,sinks=2"
    q, k, v = tokens(200, rotary, bias=0.0)
    text, layer, bare, written = (made(x, rotary) for x in ("keep_all", spec, spec, spec))
    fed(text, q[:, :, :190], k[:, :, :190], v[:, :, :190], [190])
    for one in (layer, bare):
        begin_with(one, text)
    shared, whole = (x.slots.segments()[0].planes["k"] for x in (layer, text))
    assert shared.data_ptr() == whole.data_ptr()
    bare.settle()  # without queries
    written.extend(k[:, :, :190], v[:, :, :190])
    chunk = [x[:, :, 190:] for x in (q, k, v)]
    if between == "saved":
        state, layer = layer.state().copy(), made(spec, rotary)
        layer.restore(state)
    elif between == "forked":
        layer = layer.fork()
    elif between == "rows":
        layer.take_rows(torch.tensor([0, 0]))
        layer.step(*(torch.cat([x[:, :, :1], 9 * x[:, :, :1]]) for x in chunk), scale=0.02)
        layer.take_rows(torch.tensor([0]))
    elif between == "failed":
        with pytest.raises(ZeroDivisionError):
            layer.step(*(x[:, :, :1] for x in chunk), scale=1.0, attend=lambda *_: 1 / 0)
    elif between == "cropped":
        layer.crop(-20)
        fed(layer, *(x[:, :, 170:190] for x in (q, k, v)), [20])
    first = 1 if between == "rows" else 0
    exact = fed(text, *chunk, [1, 9])
    own = fed(layer, *(x[:, :, first:] for x in chunk), [1, 9] if not first else [9])
    rest, expected = (fed(x, *chunk, [1, 9]) for x in (bare, written))
    if policy == "keep_all":
        own_error, rest_error = (apart(x[:, :, -9:], exact[:, :, -9:]) for x in (own, rest))
        assert own_error < rest_error / 2
    if between != "cropped":
        torch.testing.assert_close(own[:, :, -9:], expected[:, :, -9:])
    assert text.length == 200


def test_values_have_no_centre() -> None:
    assert Int4().for_values() == Int4(hadamard=False, centre=0)
