"""Calls that no backend may compute are refused in the same words, before anything is read."""

from __future__ import annotations

import pytest
import torch

from kvkeep.attention import Segment, View, attend, backends
from kvkeep.codec import Plain
from kvkeep.errors import ShapeError
from kvkeep.planes import LAST, POSITION, Reach
from kvkeep.spec import CacheSpec

BACKENDS = [None, *(b.name for b in backends() if b.available)]
N = 2


def tensors(width=8):
    return torch.randn(1, 4, N, width), torch.randn(1, 2, 6, width), torch.randn(1, 2, 6, width)


def view(k, v, position=None, bounds=None, reaches=(), **kind):
    place = torch.arange(k.shape[2], dtype=torch.int32).view(1, 1, -1)
    segment = Segment({"k": k, "v": v, POSITION: place}, Plain(), Plain(), **kind)
    position = torch.arange(6 - N, 6) if position is None else position
    return View((segment,), position, True, reaches, bounds)


def assert_refused(says, q, seen, **options):
    """By every backend in the same words; `says` is a part of them."""
    words = set()
    for backend in BACKENDS:
        with pytest.raises(ShapeError) as raised:
            attend(q, seen, **({"scale": 0.4} | options), backend=backend)
        words.add(str(raised.value))
    assert len(words) == 1
    assert says in words.pop()


@pytest.mark.parametrize("far", [2**31, 2**32, 2**32 + 4, 2**63 - 1, -(2**40)])
def test_positions_of_more_than_32_bits(far):
    q, k, v = tensors()
    last = torch.tensor([4, far])
    assert_refused(f" {far}", q, view(k, v, last))
    assert_refused(f" {far}", q, view(k, v, bounds=torch.stack([torch.zeros_like(last), last])))
    assert_refused("32 bits", q, view(k, v, last), causal=False)


def test_the_largest_position_is_seen():
    q, k, v = tensors()
    bounds = torch.tensor([[0, 0], [LAST, LAST]])
    expected = attend(q, view(k, v), scale=0.4, causal=False, backend="reference")[0]
    for backend in BACKENDS:
        out = attend(q, view(k, v, bounds=bounds), scale=0.4, backend=backend)[0]
        torch.testing.assert_close(out, expected, atol=2e-6, rtol=1e-5)


def test_positions_that_are_no_signed_integers():
    q, k, v = tensors()
    for dtype in (torch.uint64, torch.uint32, torch.float32, torch.bool, torch.complex64):
        assert_refused(str(dtype), q, view(k, v, torch.arange(4, 6).to(dtype)))
        assert_refused(str(dtype), q, view(k, v, bounds=torch.zeros(2, N, dtype=dtype)))


@pytest.mark.parametrize("softcap", [0.0, -3.0, float("inf"), float("nan")])
def test_a_softcap_that_caps_nothing(softcap):
    q, k, v = tensors()
    assert_refused(f"softcap {softcap}", q, view(k, v), softcap=softcap)


@pytest.mark.parametrize("window", [-1, 2.5, 2**31, 2**63])
def test_windows(window):
    q, k, v = tensors()
    assert_refused(f"size={window}", q, view(k, v), window=window)
    assert_refused(f"sinks={window}", q, view(k, v, reaches=(Reach(4, window),)))


def test_heads_that_do_not_exist():
    q, k, v = tensors()
    assert_refused("0 kv heads", q, view(k[:, :0], v[:, :0]))
    assert_refused("head -1", q, view(k[:, :1], v[:, :1], head=-1, part=True))
    assert_refused("head -2", q, view(k[:, :1], v[:, :1], head=-2, part=True))
    assert_refused("queries (1, 0, 2, 8)", q[:, :0], view(k, v))
    assert_refused("width of at least 1", q, view(k, v[..., :0]))
    for rows in (torch.tensor([0.0]), torch.tensor([False])):
        assert_refused("integers (b,)", q, view(k, v, rows=rows, part=True))


def test_memory_that_is_not_there():
    for place in ("q", "k", "v", "sinks", "position"):
        q, k, v = tensors()
        given = {"q": q, "k": k, "v": v, "sinks": torch.zeros(4), "position": torch.arange(4, 6)}
        x = given[place]
        x.untyped_storage().resize_(x.numel() * x.element_size() - 1)
        q, sinks = given.pop("q"), given.pop("sinks")
        assert_refused("was resized", q, view(**given), sinks=sinks)


def test_a_view_of_a_storage_is_as_long_as_it_reaches():
    q, k, v = tensors()
    whole = torch.zeros(1, 2, 9, 8)
    part = whole[:, :, 2:8].copy_(k)
    expected = attend(q, view(k, v), scale=0.4)[0]
    whole.untyped_storage().resize_((9 + 8) * 8 * 4)  # the last slot of the last head is behind it
    assert attend(q, view(part, v), scale=0.4)[0].equal(expected)
    whole.untyped_storage().resize_((9 + 8) * 8 * 4 - 4)
    assert_refused("plane 'k' (1, 2, 6, 8)", q, view(part, v))


def test_tensors_elsewhere_or_of_another_kind():
    q, k, v = tensors()
    meta = torch.arange(4, 6, device="meta")
    assert_refused("on meta", q, view(k, v, meta))
    assert_refused("on meta", q, view(k, v, bounds=torch.stack([meta, meta])))
    assert_refused("on meta", q, view(k, v), sinks=torch.zeros(4, device="meta"))
    assert_refused("on meta", q, view(k.to("meta"), v))
    assert_refused("sparse", q, view(k.to_sparse(), v))
    assert_refused("complex", q, view(k, v), sinks=torch.zeros(4, dtype=torch.complex64))


def negated(x):
    """x as torch negates it when it is read; in memory it has the other sign."""
    lazy = torch._neg_view(-x)
    assert lazy.is_neg()
    assert lazy.equal(x)
    return lazy


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_torch_negates_when_it_reads(backend):
    q, k, v = tensors()
    sinks = torch.randn(4)
    expected = attend(q, view(k, v), scale=0.4, sinks=sinks, backend="reference")[0]
    for place in range(4):
        given = [q, k, v, sinks]
        given[place] = negated(given[place])
        out = attend(given[0], view(*given[1:3]), scale=0.4, sinks=given[3], backend=backend)[0]
        torch.testing.assert_close(out, expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_imaginary_part_of_a_conjugate_as_the_sink_of_one_head(backend):
    q, k, v = torch.randn(1, 1, N, 8), *torch.randn(2, 1, 1, 6, 8)
    sink = torch.complex(torch.zeros(1), torch.tensor([-2.0])).conj().imag
    out = attend(q, view(k, v), scale=0.4, sinks=sink, backend=backend)[0]
    expected = attend(q, view(k, v), scale=0.4, sinks=torch.tensor([2.0]), backend="reference")[0]
    torch.testing.assert_close(out, expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_zeros_without_memory(backend):
    _, k, v = tensors()
    zeros = torch._efficientzerotensor((1, 4, N, 8))
    out = attend(zeros, view(k, v), scale=0.4, backend=backend)[0]
    expected = attend(torch.zeros(1, 4, N, 8), view(k, v), scale=0.4, backend="reference")[0]
    torch.testing.assert_close(out, expected, atol=2e-6, rtol=1e-5)


def test_values_that_are_not_known_while_tracing():
    q, k, v = tensors()

    def run(q, k, v):
        return attend(q, view(k, v), scale=0.4, backend="reference")[0]

    expected = run(q, k, v)
    traced = torch.fx.experimental.proxy_tensor.make_fx(run, tracing_mode="symbolic")(q, k, v)
    torch.testing.assert_close(traced(q, k, v), expected)
    several = torch.func.vmap(run, in_dims=(0, None, None))(q[None].repeat(3, 1, 1, 1, 1), k, v)
    torch.testing.assert_close(several, expected.expand(3, -1, -1, -1, -1))


# -- the same in a layer ---------------------------------------------------------------------


@pytest.mark.parametrize("spec", ["keep_all", "h2o:4", "window:4", "snapkv:4,window=2,step=3"])
def test_a_layer_refuses_the_same(spec):
    q, k, v = torch.randn(1, 4, 6, 8), *torch.randn(2, 1, 2, 6, 8)
    far = torch.arange(6)
    far[-1] = 2**32 + 5
    for says, given, options in (
        ("do not fit 32 bits", (q, k, v, far), {}),
        ("do not fit 32 bits", (q, k, v), {"until": far}),
        ("softcap 0.0", (q, k, v), {"softcap": 0.0}),
        ("each at least 1", (q[:, :0], k, v), {}),
        ("each at least 1", (q, k, v[..., :0]), {}),
        ("uint64", (q, k, v, torch.arange(6).to(torch.uint64)), {}),
    ):
        layer = CacheSpec.parse(spec).layer()
        for fed in (0, 6):
            with pytest.raises(ShapeError, match=says):
                layer.step(*given, scale=0.4, **options)
            assert layer.fed == fed
            if not fed:
                layer.step(q, k, v, torch.arange(6), scale=0.4)


@pytest.mark.parametrize("spec", ["keep_all", "keep_all+int8", "h2o:4"])
def test_a_layer_reads_what_torch_negates(spec):
    generator = torch.Generator().manual_seed(1)
    plain, lazy = CacheSpec.parse(spec).layer(), CacheSpec.parse(spec).layer()
    for n in (5, 1, 1, 1):
        q, k, v = (torch.randn(1, h, n, 8, generator=generator) for h in (4, 2, 2))
        out = lazy.step(negated(q), negated(k), negated(v), scale=0.4)
        assert out.equal(plain.step(q, k, v, scale=0.4))
    assert lazy.storage.read()["k"].equal(plain.storage.read()["k"])
