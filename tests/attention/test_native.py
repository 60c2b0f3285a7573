"""The native kernel, on every instruction set this machine has, against the float64 reference."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

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
from support.instruction_sets import BEST, SETS
from support.pairwise import pairwise
from support.process_group import execute, start

from kvkeep import native_library
from kvkeep.attention import Segment, View, attend, native, reference
from kvkeep.attention.options import Options
from kvkeep.codec import Codec, Int4, Int8, Plain, WithinKeys
from kvkeep.errors import UnsupportedError
from kvkeep.packing import PLAIN, KernelLayout
from kvkeep.planes import POSITION, Reach

pytestmark = pytest.mark.skipif(not native.available, reason=native.reason)

# Largest error, as a share of the largest result.
TOLERANCE = {torch.float32: 4e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}
# Queries and weights have 16 bits where they meet codes. A typical result is within 5e-5.
CODED = 2e-4
# Queries have 8 bits where they meet codes of 4 and fewer bits, and so have weights without VNNI. A
# typical result is within 1e-2, while the codes' own error is above 1e-1.
BYTES = 3e-2
BOTH = 5e-2

GROUPS = [1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 15, 16]


class Secret(Plain):
    """A codec whose planes only it can read."""

    layout = None

    def __repr__(self):
        return "Secret()"


class Own(Codec):
    """A codec of a user's, which declares a layout that kernels know and has no other attribute of
    kvkeep's codecs."""

    name = "own"
    layout = KernelLayout("int8", 16, hadamard=True)
    inner = Int8(16)

    def planes(self, dim, dtype):
        return self.inner.planes(dim, dtype)

    def encode(self, x):
        return self.inner.encode(x)

    def decode(self, planes, dtype):
        return self.inner.decode(planes, dtype)

    def rotate(self, q):
        return self.inner.rotate(q)


@pytest.fixture(autouse=True, params=SETS)
def instructions(request):
    native.use_instructions(request.param)
    yield request.param
    native.use_instructions(BEST)


once = pytest.mark.parametrize("instructions", [BEST], indirect=True)
"""For what does not depend on the instruction set."""


def bound(view):
    """The error from codes, as a share of the largest result."""
    keys = {s.key_codec.layout.packing for s in view.segments}
    values = {s.value_codec.layout.packing for s in view.segments}
    narrow = {"int4", "int3", "int2"}
    if native_library.instructions() not in ("amx", "avx512bf16", "avx512vnni") and values & narrow:
        return BOTH
    if keys & narrow:
        return BYTES
    return CODED if keys | values != {PLAIN.packing} else 0


def in_turns(names, *choices):
    """Each two values of instruction sets and of these; and, if slow, all of a covering selection
    of these for each set."""
    names, chosen = ("instructions", *names), pairwise(SETS, *choices)
    every = [(one, *case) for one in SETS for case in pairwise(*choices)]
    more = [pytest.param(*c, marks=pytest.mark.slow) for c in every if c not in chosen]
    return pytest.mark.parametrize(names, [*chosen, *more], indirect=names[:1])


def check(q, view, options, exact=None):
    out, mass = native.run(q, view, options)
    expected, expected_mass = exactly(q, view, options) if exact is None else exact
    assert out.dtype == q.dtype
    error = (out.double() - expected).abs().max() / expected.abs().max().clamp_min(1e-3)
    # With slopes, scores are of up to 1,000, which are rounded by up to 3e-5.
    tolerance = TOLERANCE[q.dtype] * (1 if options.slopes is None else 4)
    assert error <= max(tolerance, bound(view)), f"{error:.2e}"
    if options.need_mass:
        rtol = bound(view) or 1e-5
        torch.testing.assert_close(mass, expected_mass, atol=rtol / 3, rtol=rtol)
    return out


def test_the_layout_alone_says_how_codes_are_read():
    q, k, v = qkv(rows=2, slots=70, n=3)
    view = dense(k, v, 3, key=Own())
    assert native.refuses(q, view, Options(0.2)) is None
    check(q, view, Options(0.2))


@pytest.mark.parametrize(
    ("group", "width", "prefix"), [(1, 576, 512), (7, 40, 24), (16, 200, 190), (41, 600, 512)]
)
@pytest.mark.parametrize("key", [Plain(), Int8(32, hadamard=False)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_within_keys(group, width, prefix, key, dtype):
    q, k, _ = qkv(heads=1, group=group, slots=150, width=width, dtype=dtype)
    value = WithinKeys(key, prefix)
    view = dense(k, k, 1, key=key, value=value)
    check(q, view, Options(width**-0.5, need_mass=True))
    apart = torch.cat([k, k], dim=3)[..., :width]  # rows of slots that are not adjacent
    planes = view.segments[0].planes | ({"k": apart} if key == Plain() else {})
    moved = view._replace(segments=(view.segments[0]._replace(planes=planes),))
    check(q, moved, Options(width**-0.5))


@pytest.mark.parametrize(("n", "width"), [(1, 96), (3, 64), (20, 40)])
def test_the_layout_alone_says_that_scales_are_by_channel(n, width):
    q, k, v = qkv(rows=2, slots=200, n=n, width=width)
    check(q, dense(k, v, n, key=ByChannel(), value=ByChannel()), Options(0.2))


@settings(max_examples=30, deadline=None)  # for each instruction set
@given(threads=st.sampled_from([1, 2, 5]), **FEATURES)
def test_every_feature(threads, **features):
    q, view, options = call(**features)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        check(q, view, options)
    finally:
        torch.set_num_threads(before)


@in_turns(("kind", "group", "width"), KINDS, GROUPS, [64, 128, 192, 80])
def test_codes(kind, group, width):
    """Every number of queries has code of its own."""
    key, value = kind
    q, k, v = qkv(group=group, slots=201, width=width)
    check(q, dense(k, v, 1, key=key, value=value), Options(width**-0.5))


@in_turns(("group", "width"), GROUPS, [64, 128, 80, 256, 31])
def test_bfloat16(group, width):
    """Every number of queries has code of its own, and so have the ends of slots and of blocks."""
    q, k, v = qkv(group=group, slots=147, width=width, dtype=torch.bfloat16)
    check(q, dense(k, v, 1), Options(width**-0.5))


@in_turns(
    ("codec", "shape"),
    [Int8(16), Int8(48), Int8(256), Int4(32, affine=True), Int4(96)],
    [(48, 3), (112, 70), (96, 64), (192, 65)],
)
def test_any_codes(codec, shape):
    """Of every value, -128 too, with scales of both signs and groups that end with no 32 bytes."""
    width, slots = shape
    codec = codec.__class__(**{**vars(codec), "hadamard": False})
    q, k, v = qkv(group=3, slots=slots, width=width)
    (whole,) = dense(k, v, 1, key=codec, value=codec).segments
    for name, plane in whole.planes.items():
        if name in "kv":
            low = -128 if plane.dtype == torch.int8 else 0
            plane.copy_(torch.randint(low, low + 256, plane.shape))
        elif name != POSITION:
            plane.copy_(torch.randn(plane.shape))
    check(q, View((whole,), torch.arange(slots)[-1:], False), Options(0.002))


@pytest.mark.parametrize(("key", "value"), [(Plain(), Plain()), (Int8(16), Int8(16)), *KINDS])
def test_a_row_of_a_batch_equals_the_row_alone(key, value):
    for group, dtype in (
        (1, torch.bfloat16),
        (2, torch.float32),
        (4, torch.bfloat16),
        (1, torch.float32),
    ):
        q, k, v = qkv(rows=3, group=group, slots=130, dtype=dtype)
        view = dense(k[:1], v[:1], 1, key=key, value=value)
        out, _ = native.run(q, view, Options(0.2))
        for row in range(3):
            assert native.run(q[row : row + 1], view, Options(0.2))[0].equal(out[row : row + 1])


@in_turns(("kind", "n"), KINDS, [1, 40])
def test_where_codes_lie(kind, n):
    """Spare slots behind, heads inside slots, rows of odd addresses, for every plane."""
    q, k, v = qkv(rows=2, slots=90, n=n)
    view = dense(k, v, n, key=kind[0], value=kind[1])
    exact = exactly(q, view, Options(0.2))
    for placed in everywhere(view.segments[0]):
        check(q, view._replace(segments=(placed,)), Options(0.2), exact)


@in_turns(("kind", "n", "plane"), KINDS, [1, 20], ["k", "v"])
def test_a_scale_that_is_not_a_number(kind, n, plane):
    key, value = kind
    codec = key if plane == "k" else value
    q, k, v = qkv(rows=2, slots=200, n=n)
    view = dense(k, v, n, key=key, value=value)
    name = plane + ("" if codec.layout == PLAIN else "_scale")
    plane = view.segments[0].planes[name]
    plane[0, 0, 13 * plane.shape[2] // 20] = not_a_number(plane)
    out, _ = native.run(q, view, Options(0.2))
    expected, _ = exactly(q, view, Options(0.2))
    assert expected.isnan().any()
    assert out.isnan().equal(expected.isnan())


@pytest.mark.parametrize("n", [1, 20, 200])
def test_blocks_that_no_query_sees_are_not_read(n):
    """A weight of zero times NaN would be NaN."""
    q, k, v = qkv(slots=1024, n=n, dtype=torch.bfloat16)
    position = torch.arange(1024)
    position[704:768] = -1  # an evicted block; a window hides the older slots
    seen = (position >= 1024 - n - 400) & (position >= 0)
    shown = seen.view(-1, 64).any(1).repeat_interleave(64)
    view = View((segment(k, v, position),), torch.arange(1024 - n, 1024), reaches=(Reach(400),))
    clean = native.run(q, view, Options(0.2))[0]
    for name in "kv":
        view.segments[0].planes[name][:, :, ~shown] = torch.nan
    assert native.run(q, view, Options(0.2))[0].equal(clean)


@pytest.mark.parametrize(("key", "value"), KINDS)
def test_a_query_that_is_not_finite(key, value):
    q, k, v = qkv(slots=100)
    view = dense(k, v, 1, key=key, value=value)
    clean = native.run(q, view, Options(0.2))[0]
    for bad in (torch.inf, -torch.inf, torch.nan):
        q[0, 1, 0, 5] = bad
        out = native.run(q, view, Options(0.2))[0]
        assert out[:, 1].isnan().all()
        assert out[:, [0, 2, 3]].equal(clean[:, [0, 2, 3]])


def test_codes_by_hand():
    """Two slots: codes, scales and zeros as the formats say, with numbers worked out here."""
    place = torch.arange(2, dtype=torch.int32).view(1, 1, 2)
    low, high = torch.full((1, 1, 1, 32), 0x10), torch.full((1, 1, 1, 32), 0x3F)
    planes = {
        "k": torch.zeros(1, 1, 2, 64, dtype=torch.int8),
        "k_scale": torch.ones(1, 1, 2, 1, dtype=torch.float16),
        "v": torch.cat([low, high], dim=2).to(torch.uint8),  # 0, 1, 0, 1, ...; 15, 3, 15, 3, ...
        "v_scale": torch.tensor([[2.0, 4.0], [6.0, 8.0]], dtype=torch.float16).view(1, 1, 2, 2),
        "v_zero": torch.tensor([[1.0, 0.0], [0.0, 5.0]], dtype=torch.float16).view(1, 1, 2, 2),
        POSITION: place,
    }
    q = torch.ones(1, 1, 1, 64)
    for affine, expected in (
        (True, ([45.5, 10.5], [62.5, 16.5])),  # e.g. (2 * 0 + 1 + 6 * 15) / 2
        (False, ([13.0, -22.0], [12.0, -34.0])),  # e.g. (2 * (0 - 8) + 6 * (15 - 8)) / 2
    ):
        codec = Int4(affine=affine, hadamard=False)
        held = planes if affine else {n: p for n, p in planes.items() if n != "v_zero"}
        view = View((Segment(held, Int8(hadamard=False), codec),), place[0, 0, -1:], False)
        out, _ = native.run(q, view, Options(1.0))
        halves = [torch.tensor(pair).repeat(16) for pair in expected]
        torch.testing.assert_close(out.flatten(), torch.cat(halves), atol=0.2, rtol=0)


@in_turns(("dtype", "shape"), list(TOLERANCE), [(1, 20_000), (16, 4_000), (700, 900)])
def test_long(dtype, shape):
    n, slots = shape
    q, k, v = qkv(heads=2, group=4, slots=slots, n=n, dtype=dtype)
    check(q, dense(k, v, n), Options(0.125))


def test_as_good_as_torch_in_bfloat16():
    q, k, v = qkv(heads=4, group=4, slots=3000, width=128, dtype=torch.bfloat16)
    expected, _ = exactly(q, dense(k, v, 1), Options(0.09))
    attention = torch.nn.functional.scaled_dot_product_attention
    theirs = attention(q, k, v, scale=0.09, enable_gqa=True)
    ours, _ = native.run(q, dense(k, v, 1), Options(0.09))
    assert (ours - expected).abs().mean() <= 1.001 * (theirs - expected).abs().mean()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("n", [1, 3])
def test_where_slots_lie(dtype, n):
    """Spare slots behind, heads inside slots, rows of odd addresses, queries of any strides."""
    q, k, v = qkv(rows=2, slots=90, n=n, dtype=dtype)

    def in_buffer(x):
        return torch.cat([x, torch.full_like(x, torch.nan)], dim=2)[:, :, :90]

    def heads_inside(x):
        return x.transpose(1, 2).contiguous().transpose(1, 2)

    def unaligned(x):
        return torch.cat([x.new_zeros(1), x.flatten()])[1:].view_as(x)

    def wide(x):
        return torch.cat([x, x], dim=3)[..., : x.shape[3]]

    for place in (in_buffer, heads_inside, unaligned, wide):
        check(q, dense(place(k), place(v), n), Options(0.2))


@once
@pytest.mark.slow
def test_mass_of_a_long_prompt():
    """In several ranges of queries, the last of them uneven, with as many kept weights in each."""
    q, k, v = qkv(heads=1, group=4, slots=2600, n=2500, width=32)
    check(q, dense(k, v, 2500), Options(0.2, need_mass=True))
    check(q, dense(k, v, 2500), Options(0.2, need_mass=True, observed=1700))


@once
def test_mass_of_a_long_prompt_takes_bounded_memory():
    code = """
import resource, torch
from kvkeep.attention import Segment, View, attend
from kvkeep.codec import Plain
q, k, v = torch.randn(1, 8, 6000, 16), torch.randn(1, 1, 6000, 16), torch.randn(1, 1, 6000, 16)
place = torch.arange(6000, dtype=torch.int32)
segment = Segment({"k": k, "v": v, "position": place.view(1, 1, -1)}, Plain(), Plain())
view = View((segment,), place, ragged=False)
attend(q, view, scale=0.2, backend="native")
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
mass = attend(q, view, scale=0.2, need_mass=True, backend="native")[1]
assert abs(mass.sum() - 6000) < 0.1
more = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
assert more < 120 * 1024, more  # KiB; all weights at once would be 576 MiB
"""
    start(execute, 1, code, [], [])


def test_observed_queries():
    """Slots that only unobserved queries see receive nothing; padding does not count."""
    k = torch.zeros(2, 1, 6, 32)
    place = torch.tensor([[0, 1, 2, 3, 4, 5], [-1, -1, 0, 1, 2, 3]])
    view = View((segment(k, k, place),), place)
    _, mass = native.run(torch.zeros(2, 1, 6, 32), view, Options(1.0, None, None, True, 2))
    early = [1 / 5 + 1 / 6] * 5 + [1 / 6]
    late = [0, 0, 1 / 3 + 1 / 4, 1 / 3 + 1 / 4, 1 / 3 + 1 / 4, 1 / 4]
    torch.testing.assert_close(mass, torch.tensor([[early], [late]]))


@once
def test_what_it_refuses():
    q, k, v = qkv(slots=20)
    (whole,) = dense(k, v, 1).segments
    secret = View((whole._replace(value_codec=Secret()),), torch.arange(1), False)
    with pytest.raises(UnsupportedError, match=r"cannot read codes of Secret\(\)"):
        attend(q, secret, scale=0.2, backend="native")
    with pytest.raises(UnsupportedError, match="gradients"):
        attend(q.requires_grad_(), dense(k, v, 1), scale=0.2, backend="native")
    with pytest.raises(UnsupportedError, match="float64"):
        attend(q.double(), dense(k.double(), v.double(), 1), scale=0.2, backend="native")


def test_keys_and_values_of_another_type_than_the_queries():
    for key, value in ((torch.bfloat16, torch.float16), (torch.float32, torch.bfloat16)):
        q, k, v = qkv(slots=70, n=3)
        check(q, dense(k.to(key), v.to(value), 3), Options(0.2))


def test_an_empty_segment():
    q, k, v = qkv(slots=50, n=2)
    none = segment(k[:, :, :0], v[:, :, :0], torch.arange(0))
    (own,) = dense(k, v, 2).segments
    view = View((none, own), torch.arange(48, 50), ragged=False)
    expected = check(q, dense(k, v, 2), Options(0.2))
    assert native.run(q, view, Options(0.2))[0].equal(expected)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("ragged", [False, True])
def test_bad_keys_as_in_the_reference(bad, ragged):
    q, k, v = qkv(rows=2, slots=200, n=2)
    k[0, :, 130] = bad
    place = torch.arange(200)
    view = View((segment(k, v, place),), place[-2:], ragged=ragged)
    out, _ = native.run(q, view, Options(0.2))
    expected, _ = exactly(q, view, Options(0.2))
    torch.testing.assert_close(out.double(), expected, atol=3e-6, rtol=1e-5, equal_nan=True)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize(("group", "n"), [(1, 1), (7, 1), (2, 20)])
def test_bad_bfloat16(bad, group, n):
    """In keys, in values, and in the last of an odd number of slots."""
    for where, slot in ((0, 70), (1, 70), (1, 140)):
        q, *kv = qkv(slots=141, group=group, n=n, dtype=torch.bfloat16)
        kv[where][0, 0, slot, 5] = bad
        out, _ = native.run(q, dense(*kv, n), Options(0.2))
        expected, _ = exactly(q, dense(*kv, n), Options(0.2))
        assert out.isfinite()[:, group:].all()
        torch.testing.assert_close(out.double(), expected, atol=2e-2, rtol=2e-2, equal_nan=True)


def test_who_sees_nothing_gets_zero():
    q, k, v = qkv(rows=2, slots=100, n=2)
    place = torch.arange(100).repeat(2, 1)
    place[0] = -1
    view = View((segment(k, v, place),), place[:, -2:])
    out, mass = native.run(q, view, Options(0.2, need_mass=True))
    assert out[0].eq(0).all()
    assert mass[0].eq(0).all()
    assert not out[1].eq(0).any()


def test_huge_scores():
    q, k, v = qkv(slots=300)
    check(q, dense(k, v, 1), Options(300.0))


@once
def test_several_python_threads():
    inputs = [qkv(slots=500 + i, n=1 + i % 3, group=3) for i in range(12)]

    def one(x):
        q, k, v = x
        return native.run(q, dense(k, v, q.shape[2]), Options(0.2))[0]

    expected = [one(x) for x in inputs]
    with ThreadPoolExecutor(6) as pool:
        for _ in range(5):
            assert all(map(torch.equal, pool.map(one, inputs), expected))


@once
@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_fork_after_first_use():
    q, k, v = qkv(heads=8, slots=5000)
    view, expected = dense(k, v, 1), None
    expected = native.run(q, view, Options(0.2))[0]
    child = os.fork()
    if not child:
        code = 1
        try:
            out = native.run(q, view, Options(0.2))[0]
            code = 0 if (out - expected).flatten()[0].abs() < 1e-6 else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@once
def test_an_instruction_set_that_is_not_here():
    with pytest.raises(UnsupportedError, match="there is"):
        native.use_instructions("mmx")


@once
@pytest.mark.parametrize(
    ("n", "past", "heads", "threads"),
    [(200, 80, 1, 16), (200, 80, 4, 2), (512, 0, 2, 16), (600, 100, 1, 2), (1500, 0, 4, 16)],
)
def test_mass_of_a_chunk_longer_than_its_past(n, past, heads, threads):
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
