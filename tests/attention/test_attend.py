"""attend, against attention written out here in float64."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.pairwise import pairwise
from support.slow import slow_unless

from kvkeep import attention
from kvkeep.attention import Backend, Rotation, Segment, View, attend, backends, reference, sdpa
from kvkeep.codec import Fp8, Int4, Int8, Kivi, Plain
from kvkeep.errors import ShapeError, UnsupportedError
from kvkeep.packing import PLAIN
from kvkeep.planes import POSITION, Reach, joined

BACKENDS = [b.name for b in backends() if b.available]
D = 8


def segment(k, v, position, rotation=None):
    """A plain segment; position (S,) or (B, S)."""
    place = torch.as_tensor(position, dtype=torch.int32)
    place = place.view(-1, 1, k.shape[2]).expand(k.shape[0], 1, -1)
    return Segment({"k": k, "v": v, POSITION: place}, Plain(), Plain(), rotation)


def written_out(
    q,
    segments,
    query_position,
    *,
    scale,
    reaches=(),
    bounds=None,
    softcap=None,
    sinks=None,
    slopes=None,
    bias=None,
):
    """Every row, head and query on its own, in float64. Segments: (k, v, position (B|1, S))."""
    rows, query_heads, n, _ = q.shape
    out = torch.zeros(rows, query_heads, n, segments[0][1].shape[-1], dtype=torch.float64)
    mass = torch.zeros(rows, segments[0][0].shape[1], sum(s[0].shape[2] for s in segments))
    for b in range(rows):
        for h in range(query_heads):
            heads = segments[0][0].shape[1]
            group = query_heads // heads
            k, v, place = (
                torch.cat([s[i][b if s[i].shape[0] > 1 else 0, h // group] for s in segments])
                if i < 2
                else torch.cat([s[2][b if s[2].shape[0] > 1 else 0] for s in segments])
                for i in range(3)
            )
            for i in range(n):
                t = int(query_position.expand(rows, -1)[b, i])
                first, last = (0, t) if bounds is None else bounds.expand(rows, -1, -1)[b, :, i]
                seen = (place >= 0) & (place >= first) & (place <= last)
                for size, first in reaches:
                    seen &= (t - place < size) | (place < first)
                if not seen.any():
                    continue
                score = (k.double() @ q[b, h, i].double()) * scale
                if softcap:
                    score = softcap * torch.tanh(score / softcap)
                if slopes is not None:
                    score = score + slopes[h].double() * (place - t)
                if bias is not None:
                    score = score + bias[b, h, i].double()[(t - place).clamp(0, bias.shape[3] - 1)]
                weight = torch.where(seen, score.exp(), 0.0)
                total = weight.sum() + (0 if sinks is None else math.exp(sinks[h]))
                out[b, h, i] = (weight / total) @ v.double()
                mass[b, h // group] += (weight / total / group).float()
    return out, mass


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    rows=st.integers(1, 2),
    heads=st.integers(1, 2),
    group=st.sampled_from([1, 3]),
    past=st.integers(0, 12),
    shared=st.integers(0, 6),
    n=st.integers(1, 6),
    pads=st.integers(0, 3),
    reach=st.sampled_from([None, (5, 0), (4, 2)]),
    window=st.sampled_from([None, 6]),
    bounds=st.sampled_from([None, None, "of each row", "of all rows"]),
    softcap=st.sampled_from([None, 3.0]),
    with_sinks=st.booleans(),
    with_slopes=st.booleans(),
    distances=st.sampled_from([0, 1, 4, 30]),
    value_width=st.sampled_from([D, 5]),
)
@example(  # rows with bounds of their own that share slots and positions
    seed=0,
    rows=2,
    heads=1,
    group=1,
    past=0,
    shared=1,
    n=1,
    pads=0,
    reach=None,
    window=None,
    bounds="of each row",
    softcap=None,
    with_sinks=False,
    with_slopes=True,
    distances=0,
    value_width=D,
)
def test_every_feature(
    seed,
    rows,
    heads,
    group,
    past,
    shared,
    n,
    pads,
    reach,
    window,
    bounds,
    softcap,
    with_sinks,
    with_slopes,
    distances,
    value_width,
):
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(*shape, generator=generator)

    length = past + n
    position = torch.arange(shared, shared + length).expand(rows, -1).clone()
    if pads:  # row 0 begins with empty slots
        position[0] -= pads
        position[0, : min(pads, length)] = -1
    sinks = random(heads * group) if with_sinks else None
    slopes = random(heads * group) if with_slopes else None
    bias = random(rows, heads * group, n, distances) if distances else None
    parts = [(random(rows, heads, length, D), random(rows, heads, length, value_width), position)]
    if shared:
        k, v = random(1, heads, shared, D), random(1, heads, shared, value_width)
        parts.insert(0, (k, v, torch.arange(shared)[None]))
    query_position = position[:, past:]
    q = random(rows, heads * group, n, D)
    limited = None
    if bounds:
        many = torch.randint(0, 6, (2, rows, n), generator=generator)
        limited = torch.stack([query_position - many[0], query_position + many[1] - 1], dim=1)
        limited = limited if bounds == "of each row" else limited[0]
    view = View(
        tuple(segment(*part) for part in parts),
        query_position if pads else query_position[0],
        ragged=bool(pads),
        reaches=() if reach is None else (Reach(*reach),),
        bounds=limited,
    )
    limits = ([reach] if reach else []) + ([(window, 0)] if window else [])
    expected, mass = written_out(
        q,
        parts,
        query_position,
        scale=0.5,
        reaches=limits,
        bounds=limited,
        softcap=softcap,
        sinks=sinks,
        slopes=slopes,
        bias=bias,
    )
    options = {"scale": 0.5, "window": window, "softcap": softcap, "sinks": sinks}
    options |= {"slopes": slopes, "bias": bias}
    out, got = attend(q, view, **options, need_mass=True)
    # Biases make scores large, which rounds them more.
    atol = 1e-6 if slopes is None and bias is None else 5e-6
    torch.testing.assert_close(out, expected.float(), atol=atol, rtol=1e-5)
    torch.testing.assert_close(got, mass, atol=1e-5, rtol=1e-5)
    for name in set(BACKENDS) - {"triton"}:  # test_triton.py compares it with the reference
        try:
            out, _ = attend(q, view, **options, backend=name)
        except UnsupportedError:
            assert name != "reference"
            continue
        torch.testing.assert_close(out, expected.float(), atol=1e-6, rtol=1e-5)


def dense(k, v, n, start=0):
    """A view of one segment in order, whose last n slots are the chunk."""
    stop = start + k.shape[2]
    place = torch.arange(start, stop)
    return View((segment(k, v, place),), place[-n:], ragged=False)


def qkv(rows=1, heads=2, group=2, slots=40, n=40, dtype=torch.float32, width=D):
    return (
        torch.randn(rows, heads * group, n, D, dtype=dtype),
        torch.randn(rows, heads, slots, D, dtype=dtype),
        torch.randn(rows, heads, slots, width, dtype=dtype),
    )


@pytest.mark.parametrize(
    ("backend", "observed"),
    slow_unless(
        lambda case: case[0] != "triton" or case[1] in (0, 2),  # Triton's interpreter is slow
        product([name for name in BACKENDS if name != "sdpa"], [0, 1, 2, 5, 9, None]),
    ),
)
def test_observed_queries(monkeypatch, backend, observed):
    """The mass of a row's newest real queries alone, in one block of queries or in many."""
    q, k, v = qkv(rows=2, slots=9, n=5)
    place = torch.arange(9).repeat(2, 1)
    place[0] -= 6
    place[0].clamp_(min=-1)  # of the five queries of row 0 three are real
    view = View((segment(k, v, place),), place[:, -5:])
    expected = torch.zeros(2, 2, 9)
    for row, first in ((0, 6), (1, 4)):
        newest = range(max(first, 9 - (9 if observed is None else observed)), 9)
        for i in newest:
            one = View((segment(k, v, place),), place[:, i : i + 1])
            _, mass = attend(q[:, :, i - 4 : i - 3], one, scale=0.4, need_mass=True)
            expected[row] += mass[row]
    for _ in range(2):
        _, mass = attend(q, view, scale=0.4, need_mass=True, observed=observed, backend=backend)
        torch.testing.assert_close(mass, expected, atol=2e-6, rtol=1e-5)
        monkeypatch.setattr(reference, "_SCORES_PER_BLOCK", 40)


@pytest.mark.parametrize(
    ("backend", "offset", "width", "interleaved"),
    pairwise(BACKENDS, [7, -3], [D, 4], [False, True]),
)
def test_rotary_offset_equals_rotated_keys(backend, offset, width, interleaved):
    q, k, v = qkv(slots=6, n=3)
    inv_freq = 10000.0 ** -(torch.arange(0, width, 2) / width)
    forward = Rotation(-offset, inv_freq, interleaved)  # turn(x) is then R(offset) x
    place = torch.arange(3, 9)
    elsewhere = segment(*qkv(slots=5)[1:], torch.arange(offset + 5, offset + 10).clamp(max=2))
    moved = Rotation(offset, inv_freq, interleaved)
    last = View((elsewhere, segment(k, v, place, moved)), place[-3:], ragged=False)
    really = View((elsewhere, segment(forward.turn(k), v, place)), place[-3:], ragged=False)
    out, _ = attend(q, last, scale=0.4, backend=backend)
    expected, _ = attend(q, really, scale=0.4, backend="reference")
    torch.testing.assert_close(out, expected, atol=2e-6, rtol=1e-5)


def test_rotation_by_its_definition():
    x = torch.tensor([1.0, 0.0, 0.0, 1.0, 9.0])
    half = Rotation(1, torch.tensor([math.pi / 2, math.pi]))  # pairs (0, 2) and (1, 3)
    expected = torch.tensor([0.0, 0.0, -1.0, -1.0, 9.0])
    torch.testing.assert_close(half.turn(x), expected, atol=1e-6, rtol=0)
    pairs = Rotation(1, torch.tensor([math.pi / 2, math.pi]), interleaved=True)
    expected = torch.tensor([0.0, -1.0, 0.0, -1.0, 9.0])
    torch.testing.assert_close(pairs.turn(x), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("n", [1, 5, 40])
@pytest.mark.parametrize("window", [None, 7])
def test_blocks_of_queries_change_nothing(monkeypatch, n, window):
    q, k, v = qkv(rows=2, n=n)
    view = dense(k, v, n)
    whole = attend(q, view, scale=0.4, window=window, backend="reference")[0]
    monkeypatch.setattr(sdpa, "_MASKED_SCORES", 90)
    monkeypatch.setattr(reference, "_SCORES_PER_BLOCK", 90)
    for backend in ("sdpa", "reference"):  # others have no blocks of these sizes
        out, _ = attend(q, view, scale=0.4, window=window, backend=backend)
        torch.testing.assert_close(out, whole, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("n", [1, 5, 40])
@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("ragged", [False, True])
def test_the_path_of_other_devices(monkeypatch, n, window, ragged):
    """Where torch gives no log-sum-exp, one segment goes to its public function."""
    q, k, v = qkv(rows=2, n=n)
    place = torch.arange(40).repeat(2, 1)
    if ragged:
        place[0] -= 38
        place[0].clamp_(min=-1)
    view = View((segment(k, v, place),), place[:, -n:], ragged=ragged)
    monkeypatch.setattr(sdpa, "_gives_lse", lambda *_: False)
    monkeypatch.setattr(sdpa, "_MASKED_SCORES", 300)
    out, _ = attend(q, view, scale=0.4, window=window, backend="sdpa")
    expected, _ = attend(q, view, scale=0.4, window=window, backend="reference")
    torch.testing.assert_close(out, expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize(("backend", "n", "window"), pairwise(BACKENDS, [1, 5, 40], [None, 7]))
def test_any_strides(backend, n, window):
    q, k, v = qkv(n=n)
    expected, _ = attend(q, dense(k, v, n), scale=0.4, window=window, backend="reference")

    def column_major(x):
        return x.transpose(2, 3).contiguous().transpose(2, 3)

    def spaced(x):
        return torch.stack([x, torch.full_like(x, torch.nan)], dim=-1)[..., 0]

    for strided in (column_major, spaced):
        view = dense(strided(k), strided(v), n)
        out, _ = attend(strided(q), view, scale=0.4, window=window, backend=backend)
        torch.testing.assert_close(out, expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("peak", [True, False])
@pytest.mark.parametrize("by_row", [True, False])
def test_parts_of_different_lengths_and_a_segment_of_all_heads(causal, peak, by_row):
    """Against one segment of all slots, in which shorter parts have empty slots behind."""
    q, k, v = qkv(rows=3, heads=2, slots=40, n=5)
    place = torch.arange(40, dtype=torch.int32).expand(3, 2, 40).clone()
    lengths = {(row, head): 30 - 7 * row * by_row - 4 * head for row in range(3) for head in (0, 1)}
    for (row, head), length in lengths.items():
        place[row, head, length:30] = -1

    def held_in(*planes):
        return Segment(dict(zip(("k", "v", POSITION), planes, strict=True)), Plain(), Plain())

    parts = []
    for head in (0, 1):
        for rows in torch.arange(3).split(1) if by_row else (None,):
            n = lengths[0 if rows is None else int(rows), head]
            at = slice(None) if rows is None else rows
            own = [x[at, head : head + 1, :n] for x in (k, v, place)]
            parts.append(held_in(*own)._replace(head=head, rows=rows, part=True))
    common = held_in(*(x[:, :, 30:] for x in (k, v, place)))
    options = {"scale": 0.3, "causal": causal, "need_mass": True, "peak": peak}
    options |= {"sinks": torch.randn(4), "slopes": torch.rand(4), "backend": None}
    options["bias"] = torch.randn(3, 4, 5, 9)
    view = View((*parts, common), torch.arange(35, 40))
    whole = View((held_in(k, v, place),), view.position)
    found, expected = (attend(q[:, :, :5], one, **options) for one in (view, whole))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
    assert view.slots == 40
    held = view.in_order(torch.float32, torch.float32, moved=True)
    assert held.position.equal(place.sort(dim=2).values)
    assert held.as_slots(held.position).equal(place)
    for keys, positions, own in zip(
        held.keys.flatten(0, 1), held.position.flatten(0, 1), k.flatten(0, 1), strict=True
    ):
        assert keys[positions >= 0].equal(own[positions[positions >= 0].long()])
    for wrong in ((common, *parts), (*parts[1:], common), (*parts, common._replace(head=0))):
        with pytest.raises(ShapeError, match="before them parts"):
            attend(q[:, :, :5], view._replace(segments=wrong), scale=0.3)


@pytest.mark.parametrize("backend", BACKENDS)
def test_who_sees_nothing_gets_zero(backend):
    q, k, v = qkv(slots=3, n=3)
    place = torch.tensor([[-1, -1, 0]])
    view = View((segment(k, v, place),), place)
    out, _ = attend(q, view, scale=0.4, backend=backend)
    assert out[:, :, :2].eq(0).all()
    torch.testing.assert_close(out[:, :, 2], v[:, :, 2].repeat_interleave(2, dim=1))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_key_stays_in_its_row(backend, bad):
    q, k, v = qkv(rows=2, slots=10, n=2)
    clean = attend(q, dense(k, v, 2), scale=0.4, backend=backend)[0]
    k[0, :, 3] = bad
    out = attend(q, dense(k, v, 2), scale=0.4, backend=backend)[0]
    assert out[1].equal(clean[1])
    if math.isnan(bad):
        assert out[0].isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("n", [1, 16, 300])
def test_half_precision_is_about_torchs(dtype, n):
    """Each of two merged parts is rounded once before the merge, so half as much again at most."""
    q, k, v = qkv(slots=300, n=n, dtype=dtype)
    exact = attend(q.double(), dense(k.double(), v.double(), n), scale=0.35)[0]
    mask = torch.ones(n, 300, dtype=torch.bool).tril(300 - n)
    theirs = torch.nn.functional.scaled_dot_product_attention(
        q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), attn_mask=mask, scale=0.35
    )
    out = attend(q, dense(k, v, n), scale=0.35)[0]
    assert out.dtype == dtype
    assert (out - exact).abs().mean() <= 1.5 * (theirs - exact).abs().mean()


def test_float64_is_exact():
    q, k, v = qkv(dtype=torch.float64, n=5)
    fast, slow = (attend(q, dense(k, v, 5), scale=0.4, backend=b)[0] for b in ("sdpa", "reference"))
    torch.testing.assert_close(fast, slow, atol=1e-14, rtol=1e-13)


@pytest.mark.parametrize("slots", [4, 6])
def test_gradients(slots):
    q, k, v = qkv(heads=1, slots=slots, n=4, dtype=torch.float64)
    inputs = [x.requires_grad_() for x in (q, k, v, torch.randn(2, dtype=torch.float64))]

    def run(q, k, v, sinks=None, slopes=None, bias=None):
        options = {"sinks": sinks, "slopes": slopes, "bias": bias}
        return attend(q, dense(k, v, 4), scale=0.4, **options)[0]

    torch.autograd.gradcheck(run, inputs[:3])
    torch.autograd.gradcheck(run, inputs)
    slopes = torch.tensor([0.3, 1.1], dtype=torch.float64)
    torch.autograd.gradcheck(lambda *x: run(*x, slopes=slopes), inputs)
    bias = torch.randn(1, 2, 4, 3, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(lambda *x: run(*x[:3], bias=x[3]), [*inputs[:3], bias])


def test_gradients_of_what_is_not_causal():
    q, k, v = qkv(heads=1, slots=6, n=4, dtype=torch.float64)
    inputs = [x.requires_grad_() for x in (q, k, v)]

    def run(q, k, v):
        return attend(q, dense(k, v, 4), scale=0.4, causal=False, backend="sdpa")[0]

    torch.autograd.gradcheck(run, inputs)


@pytest.mark.parametrize("backend", BACKENDS)
def test_not_causal(backend):
    """Every query sees the slots after it, also where it has none of its own; padding none."""
    q, k, v = qkv(rows=2, slots=6, n=8)
    place = torch.arange(6).repeat(2, 1)
    place[0, :2] = -1
    queries = torch.arange(8).repeat(2, 1)
    queries[1, 3] = -1
    view = View((segment(k, v, place),), queries)
    out, _ = attend(q, view, scale=0.4, causal=False, backend=backend)
    keys, values = (x.repeat_interleave(2, dim=1) for x in (k, v))
    seen = (place >= 0)[:, None, None]
    expected = torch.nn.functional.scaled_dot_product_attention(
        q, keys, values, attn_mask=seen, scale=0.4
    )
    expected[1, :, 3] = 0
    torch.testing.assert_close(out, expected, atol=2e-6, rtol=1e-5)
    with pytest.raises(ShapeError, match="fewer than the chunk's 8"):
        attend(q, view, scale=0.4, backend=backend)


def test_shapes_that_do_not_fit():
    q, k, v = qkv(slots=6, n=2)
    view = dense(k, v, 2)
    for wrong in (q[:, :3], q[:, :, :1], q[0], q.repeat(2, 1, 1, 1)[:0]):
        with pytest.raises(ShapeError):
            attend(wrong, view, scale=0.4)
    for logits in ({"sinks": torch.zeros(3)}, {"slopes": torch.zeros(3)}):
        with pytest.raises(ShapeError, match=r"\(4,\)"):
            attend(q, view, scale=0.4, **logits)
    for bias in (torch.zeros(4, 3), torch.zeros(1, 4, 1, 3), torch.zeros(1, 4, 2, 0)):
        with pytest.raises(ShapeError, match=r"give floats \(1, 4, 2\) x distances"):
            attend(q, view, scale=0.4, bias=bias)
    with pytest.raises(ShapeError, match=r"give slopes\.detach"):
        attend(q, view, scale=0.4, slopes=torch.zeros(4, requires_grad=True))


def unfit(view, **changes):
    """The view, with the last segment's planes replaced, or taken away."""
    segment = view.segments[-1]
    planes = {name: x for name, x in ({**segment.planes} | changes).items() if x is not None}
    return view._replace(segments=(*view.segments[:-1], segment._replace(planes=planes)))


@pytest.mark.parametrize("ragged", [True, False])
@pytest.mark.parametrize(
    "codec", [Plain(), Int8(), Int4(affine=True), Fp8(), Kivi(together=4)], ids=str
)
def test_segments_that_do_not_fit_never_reach_a_kernel(codec, ragged):
    q, k, v = (torch.randn(2, heads, 12, 32) for heads in (4, 2, 2))
    q, codecs = q[:, :, :4], (codec, codec.for_values())
    planes = joined(codecs[0].encode(k), "k") | joined(codecs[1].encode(v), "v")
    slots = planes["k"].shape[2]
    rest = (codec.block,) if codec.block > 1 else ()
    place = torch.arange(12, dtype=torch.int32).view(1, 1, slots, *rest).expand(2, 1, slots, *rest)
    last = Segment(planes | {POSITION: place}, *codecs)
    fitting = View((last,), torch.arange(8, 12), ragged)
    attend(q, fitting, scale=0.4)
    wide, few = torch.randn(2, 4, 4, 64), fitting._replace(position=torch.arange(3))
    wrong = [(wide, fitting), (q[:, :3], fitting), (q[:1], fitting), (q, few)]
    wrong.append((torch.cat([q] * 3), fitting))
    wrong.append((q, fitting._replace(position=torch.arange(4)[None])))
    wrong.append((q, fitting._replace(position=torch.arange(4.0))))
    for bounds in (torch.zeros(2, 3), torch.zeros(2, 4), torch.zeros(1, 2, 4).int()):
        wrong.append((q, fitting._replace(bounds=bounds)))
    wrong.append((q, fitting._replace(segments=())))
    wrong.append((q, fitting._replace(segments=(last._replace(head=1),))))
    # As the second of two, where a check of the last segment only would not look.
    for name, plane in last.planes.items():
        others = [None, plane[:, :, :-1], plane[:1, :, :0], torch.cat([plane, plane, plane])]
        others.append(plane.repeat_interleave(3, dim=1))
        if name == POSITION:
            others += [plane.long(), plane[:1], plane[0]]
        else:
            others += [plane[:, :1], plane[0], plane[:1]]
            others += [] if name == "v" else [plane[..., :-1]]  # values may be of any width
            others += [] if name in "kv" and codec.layout == PLAIN else [plane.float()]
        for other in others:
            bad = unfit(fitting, **{name: other})
            wrong += [(q, bad), (q, bad._replace(segments=(*bad.segments, last)))]
    short = {name: plane[:, :, :0] for name, plane in last.planes.items()}
    wrong.append((q, unfit(fitting, **short)))
    for asked, view in wrong:
        for backend in (None, "reference"):
            with pytest.raises(ShapeError):
                attend(asked, view, scale=0.4, backend=backend)


def test_a_backend_that_cannot():
    q, k, v = qkv(slots=6, n=2)
    with pytest.raises(UnsupportedError, match="softcap"):
        attend(q, dense(k, v, 2), scale=0.4, softcap=2.0, backend="sdpa")
    with pytest.raises(UnsupportedError, match="there are native, triton, sdpa, reference"):
        attend(q, dense(k, v, 2), scale=0.4, backend="cuda")


def test_a_backend_is_registered_before_another_and_replaced(monkeypatch):
    monkeypatch.setattr(attention, "_TABLE", attention._TABLE)
    names = [one.name for one in attention.backends()]
    mine = Backend("mine", lambda *given: 1, lambda *given: None, limits="none", about="")
    attention.register_backend(mine, before="sdpa")
    place = names.index("sdpa")
    assert [one.name for one in attention.backends()] == [*names[:place], "mine", *names[place:]]
    attention.register_backend(replace(mine, about="again"))
    assert [one.name for one in attention.backends()] == [*names, "mine"]
    assert attention.backends()[-1].about == "again"
    with pytest.raises(UnsupportedError, match="no attention backend 'other'"):
        attention.register_backend(mine, before="other")
