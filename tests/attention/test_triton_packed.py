"""One launch for one token of each of several sequences: by Triton's interpreter, or on a GPU."""

from __future__ import annotations

import pytest
import torch
from support.attend_calls import dense, qkv, segment

from kvkeep.attention import View, attend, dispatch_several, triton, triton_packed
from kvkeep.attention.options import Options
from kvkeep.codec import Int4, Int8, Kivi, Plain
from kvkeep.layer.packed import PackedLayer
from kvkeep.layer.step import StepInputs
from kvkeep.spec import CacheSpec

pytestmark = pytest.mark.skipif(bool(triton.reason()), reason=triton.reason())

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def there(view):
    segments = tuple(
        one._replace(planes={name: one.planes[name].to(DEVICE) for name in one.planes})
        for one in view.segments
    )
    return view._replace(segments=segments, position=view.position.to(DEVICE))


def check(queries, views, scale=0.2, softcap=None):
    """Compare with one call of the reference for each sequence."""
    dtype = queries[0].dtype
    q = torch.cat(queries, dim=2).to(DEVICE)
    views = [there(view) for view in views]
    options = Options(scale, softcap)
    assert triton_packed.refuses_packed(q, views, options) is None
    out = triton_packed.run_packed(q, views, options)
    assert (out.dtype, out.shape[2]) == (dtype, len(views))
    expected = torch.cat(
        [
            attend(one.to(DEVICE), view, scale=scale, softcap=softcap, backend="reference")[0]
            for one, view in zip(queries, views, strict=True)
        ],
        dim=2,
    )
    error = (out - expected).abs().max() / expected.abs().max()
    assert error <= TOLERANCE[dtype], f"{error:.2e}"


def one(slots, key, value, dtype, group, width):
    q, k, v = qkv(heads=1, group=group, slots=slots, width=width, dtype=dtype)
    return q, dense(k, v, 1, key=key, value=value)


@pytest.mark.parametrize(
    ("codec", "dtype", "group", "width"),
    [
        (Plain(), torch.bfloat16, 3, 64),
        (Plain(), torch.float32, 1, 40),
        (Int8(), torch.bfloat16, 8, 128),
        (Int4(affine=True), torch.float16, 3, 64),
        (Kivi(together=32), torch.float32, 2, 64),
    ],
)
def test_lengths_of_all_kinds(codec, dtype, group, width):
    torch.manual_seed(0)
    lengths = [64, 65, 1, 300, 33] if codec.block == 1 else [64, 32, 160, 96]
    value = codec.for_values()
    pairs = [one(n, codec, value, dtype, group, width) for n in lengths]
    check(*map(list, zip(*pairs, strict=True)), softcap=30.0 if group == 8 else None)


def test_segments_that_sequences_share_and_encodings_that_differ():
    """A tree of frozen runs: 6 sequences have the first, 3 of them another, one nothing of it; and
    one has codes before plain slots."""
    torch.manual_seed(1)
    width, dtype = 64, torch.float32

    def run(n, codec=Plain()):  # noqa: B008
        _, k, v = qkv(heads=2, slots=n, width=width, dtype=dtype)
        return segment(k, v, torch.arange(n), None, codec, codec)

    first, second, coded = run(200), run(70), run(130, Int8())
    pasts = [(first,), (first, second), (), (first,), (first, second), (first, second), (first,)]
    pasts.append((coded,))
    views = [
        View((*past, run(3 + i)), torch.tensor([999]), ragged=False) for i, past in enumerate(pasts)
    ]
    queries = [qkv(heads=2, group=3, slots=1, width=width)[0] for _ in views]
    check(queries, views)
    packed = triton_packed._Packed(torch.cat(queries, dim=2), views, Options(0.2))
    plain, of_codes = packed.kinds.values()
    assert [len(x.rows) for x in plain][:2] == [6, 1]
    assert sum(len(x.rows) for x in plain) == 6 + 3 + 8
    assert len(of_codes) == 1


def test_many_sequences_share_a_tile_and_more():
    _, k, v = qkv(heads=1, slots=150, width=32)
    shared = segment(k, v, torch.arange(150))
    views, queries = [], []
    for _ in range(40):  # with 4 queries each, more than the rows of a tile
        q, k, v = qkv(heads=1, group=4, slots=5, width=32)
        views.append(View((shared, segment(k, v, torch.arange(5))), torch.tensor([999]), False))
        queries.append(q)
    check(queries, views)


def test_refused_for_reasons():
    q, view = one(70, Plain(), Plain(), torch.float32, 2, 32)
    both = torch.cat([q, q], dim=2).to(DEVICE)
    for options, says in (
        (Options(0.2, need_mass=True), "mass"),
        (Options(0.2, sinks=torch.zeros(4)), "sinks"),
    ):
        assert says in triton_packed.refuses_packed(both, [there(view)] * 2, options)
    hidden = view._replace(ragged=True)
    options = Options(0.2)
    assert "all of its slots" in triton_packed.refuses_packed(both, [there(hidden)] * 2, options)


def test_layers_of_several_sequences_make_one_call(monkeypatch):
    """Steps with the mass among them; a failure takes all back."""
    counts = []
    real = triton_packed.run_packed

    def counted(q, views, options):
        counts.append(q.shape[2])
        return real(q, views, options)

    monkeypatch.setattr(triton_packed, "run_packed", counted)
    for module in ("kvkeep.attention", "kvkeep.layer.packed"):  # as on CUDA
        monkeypatch.setattr(f"{module}.several_at_once", lambda q: True)
    specs = ["keep_all@concat", "window:6@concat", "h2o:7@concat", "keep_all@concat"]
    together, alone = ([CacheSpec.parse(x).layer() for x in specs] for _ in range(2))

    def feed(counted=(1, 1, 1, 1)):
        q, k, v = (
            torch.randn(1, sum(counted), heads, 32, device=DEVICE).transpose(1, 2)
            for heads in (4, 2, 2)
        )
        packed = PackedLayer(together, counted)
        position = packed.next_positions(sum(counted), q.device)
        found, first = packed.run(StepInputs(q, k, v, position, 0.2)), 0
        for layer, n in zip(alone, counted, strict=True):
            at = slice(first, first + n)
            own = layer.step(q[:, :, at], k[:, :, at], v[:, :, at], scale=0.2)
            torch.testing.assert_close(found[:, :, at], own, atol=1e-5, rtol=1e-5)
            first += n

    feed((9, 3, 12, 5))
    for _ in range(3):
        feed()
    feed((1, 4, 1, 1))
    assert counts == [3] * 3 + [2]

    def fails(calls):
        raise MemoryError("no memory")

    before = [layer.fed for layer in together]
    with monkeypatch.context() as patch:
        patch.setattr("kvkeep.layer.packed.dispatch_several", fails)
        with pytest.raises(MemoryError):
            feed()
    assert [layer.fed for layer in together] == before
    assert dispatch_several([]) == []
