"""Short calls, which the native library reads from torch's tensors itself."""

from __future__ import annotations

import pytest
import torch

from kvkeep import native_library
from kvkeep.attention import Segment, View, attend, native
from kvkeep.attention.options import Options
from kvkeep.attention.plain import attend_plain
from kvkeep.codec import Plain
from kvkeep.errors import ShapeError
from kvkeep.planes import POSITION, Front

pytestmark = pytest.mark.skipif(not native_library.available, reason=native_library.reason)

SLOTS, N = 70, 3


def call(rows=1, heads=2, group=3, n=N, width=40, own_rows=None, dtype=torch.float32, held=None):
    """Queries, and planes of which all have rows and heads of their own."""
    own = own_rows or rows
    q = torch.randn(rows, heads * group, n, width).to(dtype)
    k, v = (torch.randn(own, heads, SLOTS, d).to(held or dtype) for d in (width, width + 8))
    place = torch.arange(SLOTS, dtype=torch.int32).repeat(own, heads, 1)
    return q, {"k": k, "v": v, POSITION: place}


def view(planes, n=N, slots=SLOTS, **kind):
    position = torch.arange(slots - n, slots, dtype=torch.int32)
    return View((Segment(planes, Plain(), Plain(), **kind),), position, ragged=False)


def computed(q, seen, **options):
    return attend_plain(q, seen, Options(0.2, **options), measured=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"n": 1},
        {"rows": 2, "n": SLOTS},
        {"rows": 3, "own_rows": 1},
        {"heads": 1, "group": 1, "width": 1},
    ],
    ids=str,
)
def test_the_same_bits_as_of_records_packed_in_python(sizes, dtype):
    q, planes = call(**sizes, dtype=dtype)
    seen = view(planes, q.shape[2])
    out = computed(q, seen)
    expected = native.run(q, seen, Options(0.2))[0]
    assert out.equal(expected)
    assert out.stride() == expected.stride()


def test_types_strides_and_slots_of_all_kinds():
    q, planes = call(rows=2, held=torch.bfloat16)
    spread = {n: x.transpose(1, 2).contiguous().transpose(1, 2) for n, x in planes.items()}
    half = [x.repeat(1, 1, 2, *(1,) * (x.dim() - 3))[:, :, ::2] for x in planes.values()]
    for own in (spread, dict(zip(planes, half, strict=True)), Front(planes, 41)):
        own_slots = own.length if type(own) is Front else SLOTS
        seen = view(own, slots=own_slots)
        turned = q.transpose(1, 2).contiguous().transpose(1, 2)
        expected = native.run(q, seen, Options(0.2))[0]
        assert computed(turned, seen).equal(expected)
        by_row = seen._replace(position=seen.position.repeat(2, 1))
        assert computed(q, by_row).equal(expected)


def test_calls_of_other_kinds_are_left():
    q, planes = call()
    k = planes["k"]
    assert computed(q, view(planes)) is not None
    for changed in (
        {"k": k.double()},
        {"k": k.to("meta")},
        {"k": k.conj().imag if k.is_complex() else k._neg_view()},
        {"k": torch._efficientzerotensor(k.shape)},
        {"k": k.to_sparse()},
        {"k": k.mT.contiguous().mT},
        {"k": k[:, :1]},
        {"k": k[:, :, 1:]},
        {"k": k[..., 1:]},
        {"k": k[..., None]},
        {"v": planes["v"][:, :1]},
        {"v": planes["v"][:, :, 1:]},
        {"v": planes["v"][..., :0]},
        {POSITION: planes[POSITION].long()},
        {POSITION: planes[POSITION][..., 1:]},
        {POSITION: planes[POSITION].repeat(1, 2, 1)},
        {POSITION: planes[POSITION].repeat(2, 1, 1)},
        {name: x.repeat(2, *(1,) * (x.dim() - 1)) for name, x in planes.items()},
    ):
        assert computed(q, view({**planes, **changed})) is None, changed
    for name in planes:
        assert computed(q, view({n: x for n, x in planes.items() if n != name})) is None
    for wrong in (q[0], q[:, :5], q[:, :0], q[..., 1:], q.double(), q.mT.contiguous().mT):
        assert computed(wrong, view(planes)) is None
    assert computed(q, view(planes, n=2)) is None
    assert computed(q, view(planes)._replace(position=torch.arange(N))) is None
    assert computed(q, view(Front(planes, 2), slots=SLOTS)) is None
    assert computed(q, view(Front(planes, SLOTS + 1))) is None
    assert computed(q, view(planes, used=torch.tensor(9, dtype=torch.int32))) is None
    assert computed(q, view(planes)._replace(ragged=True)) is None
    assert computed(q, view(planes)._replace(bounds=torch.zeros(2, N))) is None
    assert computed(q, view(planes), softcap=9.0) is None
    assert computed(q, view(planes), need_mass=True) is None
    assert torch.vmap(lambda x: torch.tensor(computed(x[None], view(planes)) is None))(q).all()
    assert computed(q.requires_grad_(), view(planes)) is None
    with torch.no_grad():
        assert computed(q, view(planes)) is not None


@pytest.mark.parametrize("name", ["q", "k", "v", POSITION, "position"])
def test_memory_that_was_taken_away_is_not_read(name):
    q, planes = call()
    seen = view(planes)
    shrunk = {"q": q, **planes, "position": seen.position}[name]
    shrunk.untyped_storage().resize_(shrunk.nbytes - 4)
    with pytest.raises(ShapeError, match="it was resized"):
        attend(q, seen, scale=0.2)
