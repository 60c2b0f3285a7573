"""The Triton kernels against the float64 reference: by Triton's interpreter, or on a GPU if any."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.attend_calls import (
    FEATURES,
    KINDS,
    ByChannel,
    call,
    dense,
    everywhere,
    exactly,
    not_a_number,
    qkv,
    segment,
)
from support.pairwise import covering, pairwise
from support.slow import every

from kvkeep.attention import Segment, View, attend, reference, tiles, triton
from kvkeep.attention.options import Options
from kvkeep.codec import Codec, Fp8, Int4, Int8, Kivi, Plain
from kvkeep.errors import UnsupportedError
from kvkeep.packing import PLAIN, KernelLayout
from kvkeep.planes import Reach

pytestmark = pytest.mark.skipif(bool(triton.reason()), reason=triton.reason())

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# Largest error, as a share of the largest result. Where keys are encoded, queries of 16 bits are
# rotated and rounded again.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
KINDS = [*KINDS, (Fp8(), Fp8(16)), (Int8(), Fp8())]


def there(x):
    """Tensors, views and options on the device under test."""
    if isinstance(x, torch.Tensor):
        return x.to(DEVICE)
    if isinstance(x, Segment):
        planes = {name: x.planes[name].to(DEVICE) for name in x.planes}
        return x._replace(planes=planes, used=there(x.used))
    if isinstance(x, View):
        segments = tuple(map(there, x.segments))
        return x._replace(segments=segments, position=there(x.position), bounds=there(x.bounds))
    if isinstance(x, Options):
        return x._replace(sinks=there(x.sinks), slopes=there(x.slopes), bias=there(x.bias))
    return x


def check(q, view, options, exact=None, *, larger=1.0):
    out, mass = triton.run(there(q), there(view), there(options))
    expected, expected_mass = exactly(q, view, options) if exact is None else exact
    assert out.dtype == q.dtype
    error = (out.cpu().double() - expected).abs().max() / expected.abs().max().clamp_min(1e-2)
    assert error <= larger * TOLERANCE[q.dtype], f"{error:.2e}"
    if options.need_mass:
        atol = {torch.float32: 3e-6}.get(q.dtype, 4 * TOLERANCE[q.dtype])
        scale = max(1.0, float(expected_mass.max()))
        torch.testing.assert_close(mass.cpu() / scale, expected_mass / scale, atol=atol, rtol=1e-5)
    return out


LESS = {
    "rows": st.integers(1, 2),
    "heads": st.integers(1, 2),
    "past": st.sampled_from([0, 1, 17, 64, 65, 130]),
    "group": st.sampled_from([1, 2, 3, 4, 8]),
    "n": st.sampled_from([1, 1, 1, 2, 5, 16, 30]),
}
"""The interpreter is slow."""


# The interpreter is slow, and on a GPU nearly every example compiles kernels of its own.
@pytest.mark.parametrize("examples", [4, pytest.param(20, marks=pytest.mark.slow)])
def test_every_feature(examples):
    @settings(max_examples=examples, deadline=None)
    @given(**FEATURES | LESS)
    def agrees(**features):
        q, view, options = call(**features)
        check(q, view, options, larger=2 if features["softcap"] == 3.0 else 1)

    agrees()


SHAPES = [
    (1, 64, torch.bfloat16),
    (3, 80, torch.bfloat16),
    (4, 192, torch.bfloat16),
    (16, 64, torch.float16),
    (4, 80, torch.float16),
    (4, 64, torch.float32),
    (3, 192, torch.float32),
]


@pytest.mark.parametrize(
    ("kind", "shape"),
    every(2, covering(product(KINDS, SHAPES), lambda case: (KINDS.index(case[0]), *case[1][1:]))),
)
def test_codes(kind, shape):
    """Groups of elements lie in rows of one product, which there are more or fewer of."""
    (key, value), (group, width, dtype) = kind, shape
    q, k, v = qkv(heads=1, group=group, slots=70, width=width, dtype=dtype)
    check(q, dense(k, v, 1, key=key, value=value), Options(width**-0.5))


@pytest.mark.parametrize(
    ("key", "value"),
    [KINDS[0], KINDS[3], *(pytest.param(*kind, marks=pytest.mark.slow) for kind in KINDS[2:5:2])],
)
def test_where_slots_lie(key, value):
    """Spare slots behind, heads inside slots, rows of odd addresses, for every plane."""
    n = 1 if key == value else 5
    q, k, v = qkv(rows=2, slots=40, n=n)
    view = dense(k, v, n, key=key, value=value)
    exact = exactly(q, view, Options(0.2))
    for placed in everywhere(view.segments[0]):
        check(q, view._replace(segments=(placed,)), Options(0.2), exact)


@pytest.mark.parametrize(
    ("key", "value", "plane"), every(3, [(*kind, "kv"[i % 2]) for i, kind in enumerate(KINDS)])
)
def test_a_scale_that_is_not_a_number(key, value, plane):
    codec = key if plane == "k" else value
    q, k, v = qkv(slots=140, n=2)
    view = dense(k, v, 2, key=key, value=value)
    name = plane + ("" if codec.layout == PLAIN else "_scale")
    plane = view.segments[0].planes[name]
    plane[0, 0, 13 * plane.shape[2] // 20] = not_a_number(plane)
    out, _ = triton.run(there(q), there(view), Options(0.2))
    expected, _ = exactly(q, view, Options(0.2))
    assert expected.isnan().any()
    assert out.cpu().isnan().equal(expected.isnan())


def test_a_query_that_is_not_finite():
    q, k, v = qkv(slots=100)
    clean = triton.run(there(q), there(dense(k, v, 1)), Options(0.2))[0]
    q[0, 1, 0, 5] = torch.nan
    out = triton.run(there(q), there(dense(k, v, 1)), Options(0.2))[0]
    assert out[:, 1].isnan().all()
    assert out[:, [0, 2, 3]].equal(clean[:, [0, 2, 3]])


@pytest.mark.parametrize(("splits", "need_mass"), [(1, True), (2, False), (5, True), (9, True)])
def test_splits(monkeypatch, splits, need_mass):
    """More splits than there are tiles leave some without a slot."""
    monkeypatch.setattr(tiles, "splits", lambda *_: splits)
    q, k, v = qkv(slots=150, n=3)
    check(q, dense(k, v, 3), Options(0.2, None, torch.randn(4), need_mass))


@pytest.mark.parametrize(
    ("observed", "ragged", "kind"),
    [
        (None, True, (Plain(), Plain())),
        (9, True, (Int4(affine=True), Int8())),
        (9, False, (Kivi(), Kivi())),
    ],
)
def test_mass_of_a_long_chunk(observed, ragged, kind):
    key, value = kind
    q, k, v = qkv(rows=1 + ragged, heads=1, group=4, slots=80, n=20, width=32)
    view = dense(k, v, 20, key=key, value=value)._replace(ragged=ragged)
    check(q, view, Options(0.2, need_mass=True, observed=observed))


@pytest.mark.parametrize(
    ("need_mass", "n", "used"), every(2, pairwise([False, True], [1, 40], [1, 63, 64, 100]))
)
def test_a_length_on_the_device(need_mass, n, used):
    """Only slots before it are read; the others may hold anything."""
    q, k, v = qkv(rows=2, heads=1, slots=100, n=n)
    place = torch.arange(100)
    place[used:] = -1
    k[:, :, used:] = v[:, :, used:] = torch.nan
    length = torch.tensor(used, dtype=torch.int32)
    whole = segment(k, v, place)._replace(used=length)
    exact = View((segment(k[:, :, :used], v[:, :, :used], place[:used]),), torch.arange(n) + 99)
    options = Options(0.2, need_mass=need_mass)
    out, mass = triton.run(there(q), there(exact._replace(segments=(whole,))), options)
    expected, expected_mass = exactly(q, exact, options)
    torch.testing.assert_close(out.cpu().double(), expected, atol=1e-5, rtol=1e-5)
    if need_mass:
        torch.testing.assert_close(mass[:, :, :used].cpu(), expected_mass, atol=1e-5, rtol=1e-5)
        assert mass[:, :, used:].eq(0).all()


def test_an_empty_segment():
    q, k, v = qkv(slots=50, n=2)
    none = segment(k[:, :, :0], v[:, :, :0], torch.arange(0))
    (own,) = dense(k, v, 2).segments
    check(q, View((none, own), torch.arange(48, 50), ragged=False), Options(0.2))


def test_keys_and_values_of_another_type_than_the_queries():
    for key, value in ((torch.bfloat16, torch.float16), (torch.float32, torch.bfloat16)):
        q, k, v = qkv(slots=70, n=3)
        check(q, dense(k.to(key), v.to(value), 3), Options(0.2))


def test_what_no_kernel_reads_is_decoded():
    class Secret(Plain):
        layout = None

    q, k, v = qkv(slots=72, n=3)
    for codec in (Secret(), Kivi(together=24)):
        check(q, dense(k, v, 3, key=codec, value=codec), Options(0.2, need_mass=True))


@pytest.mark.parametrize("n", [1, 20])
def test_scales_by_channel_without_zeros(n):
    q, k, v = qkv(heads=1, slots=104, n=n, width=40)
    check(q, dense(k, v, n, key=ByChannel(), value=ByChannel()), Options(0.2, need_mass=True))


def test_the_layout_alone_says_how_codes_are_read(monkeypatch):
    class Own(Codec):
        name = "own"
        layout = KernelLayout("int8", 16, hadamard=True)
        planes, encode, rotate = Int8(16).planes, Int8(16).encode, Int8(16).rotate

        def decode(self, planes, dtype):
            return Int8(16).decode(planes, dtype)

    q, k, v = qkv(slots=70, n=3)
    view = dense(k, v, 3, key=Own())
    expected, _ = reference.run(q, view, Options(0.2))
    monkeypatch.setattr(Own, "decode", None)  # the codes are read, not what they stand for
    out, _ = triton.run(there(q), there(view), Options(0.2))
    torch.testing.assert_close(out.cpu(), expected, atol=2e-3, rtol=1e-3)


def test_what_it_refuses():
    q, k, v = map(there, qkv(slots=20))
    view = there(dense(k.cpu(), v.cpu(), 1))
    for bad, options, match in (
        (q.double(), {}, "float64"),
        (q.clone().requires_grad_(), {}, "gradients"),
        (q, {"window": 3}, "at most 3 reaches, not 4"),
    ):
        many = view._replace(reaches=(Reach(9), Reach(8), Reach(7)))
        with pytest.raises(UnsupportedError, match=match):
            attend(bad, many, scale=0.2, backend="triton", **options)
    q, k, v = qkv(rows=70_000, heads=1, slots=1, width=2)
    with pytest.raises(UnsupportedError, match="65535 rows x kv heads, not 70000"):
        attend(there(q), there(dense(k, v, 1)), scale=0.2, backend="triton")
    q, k, v = qkv(slots=20, width=300)
    with pytest.raises(UnsupportedError, match=r"up to 256 wide, not \(300, 300\)"):
        attend(there(q), there(dense(k, v, 1)), scale=0.2, backend="triton")


def test_a_first_chunk_goes_to_torch_unless_it_is_named():
    q, k, v = qkv(slots=20, n=20)
    view = dense(k, v, 20)
    assert triton.yields(q, view, Options(0.2))
    assert not triton.yields(q, view, Options(0.2, need_mass=True))
    assert not triton.yields(q, view, Options(0.2, softcap=3.0))
    assert not triton.yields(q, view._replace(reaches=(Reach(3),)), Options(0.2))
    assert not triton.yields(q[:, :, :1], dense(k, v, 1), Options(0.2))
    check(q, view, Options(0.2))


def test_why_not_here(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert triton.reason.__wrapped__() == "no CUDA device"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert "ROCm" in triton.reason.__wrapped__()
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla T4")
    assert "Tesla T4 has compute capability 7.5, below 8.0" in triton.reason.__wrapped__()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    assert triton.reason.__wrapped__() == ""
    monkeypatch.setattr(triton.importlib.util, "find_spec", lambda name: None)
    assert "pip install triton" in triton.reason.__wrapped__()


@pytest.mark.parametrize(
    ("processors", "pairs", "count"),
    pairwise([16, 108, 132], [1, 8, 64, 200, 5000], [1, 3, 32, 512, 4096]),
)
def test_splits_fill_the_processors(pairs, count, processors):
    splits = tiles.splits(pairs, count, 2 * processors)
    assert 1 <= splits <= count
    waves = -(-pairs * splits // (2 * processors))
    busy = pairs * splits / (waves * 2 * processors)
    if count >= 512:
        assert busy > 0.7 or splits == 128
