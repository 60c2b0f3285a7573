"""Encoding and writing in one launch, against encoding by tensor operations."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.slow import every

from kvkeep.attention import triton
from kvkeep.codec import Fp8, Int3, Int4, Int8, Kivi, Plain
from kvkeep.layer.write_tokens import able, append
from kvkeep.packing import PLAIN
from kvkeep.planes import POSITION, joined

pytestmark = pytest.mark.skipif(bool(triton.reason()), reason=triton.reason())

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CODECS = [
    Plain(), Int8(), Int8(8, hadamard=False), Int4(), Int4(affine=True), Int4(24, hadamard=False),
    Int4(256, affine=True), Fp8(), Fp8(8),
]  # fmt: skip


def steps(codec, x):
    """What the codec says, by tensor operations."""
    return (codec.encode_in_steps if hasattr(codec, "encode_in_steps") else codec.encode)(x)


SUBNORMAL = 2.0**-24
"""The distance of the smallest float16 numbers, such as scales of tokens around 1e-3."""


def alike(found, expected, name, codec, share):
    """Codes may differ by one where x lies halfway between two: at most a `share` of them."""
    if codec.layout == PLAIN:
        torch.testing.assert_close(found, expected, atol=0, rtol=0, equal_nan=True)
        return
    if name.endswith(("_scale", "_zero")):
        torch.testing.assert_close(found, expected, atol=SUBNORMAL, rtol=1e-3, equal_nan=True)
        return
    if codec.layout.packing == "int4":
        found, expected = (torch.stack([x & 15, x >> 4], dim=-1) for x in (found, expected))
    apart = (found.int() - expected.int()).abs()
    assert apart.max() <= 1
    assert (apart > 0).float().mean() < share


APPENDS = {
    "seed": st.integers(0, 2**16),
    "codecs": st.tuples(st.sampled_from(CODECS), st.sampled_from(CODECS)),
    "rows": st.integers(1, 3),
    "heads": st.integers(1, 3),
    "n": st.sampled_from([1, 1, 2, 5]),
    "widths": st.sampled_from([(64, 64), (128, 80), (40, 18), (192, 256)]),
    "dtype": st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    "cursor": st.sampled_from(["number", "shared", "row", "head"]),
    "per_head": st.booleans(),
    "padded": st.booleans(),
    "scale": st.sampled_from([1.0, 1e-3, 300.0]),
}


@pytest.mark.parametrize("examples", [4, pytest.param(20, marks=pytest.mark.slow)])
def test_append(examples):
    settings(max_examples=examples, deadline=None)(given(**APPENDS)(agrees))()


def agrees(
    seed, codecs, rows, heads, n, widths, dtype, cursor, per_head, padded, scale
):  # fmt: skip
    torch.manual_seed(seed)
    key, value = codecs[0], codecs[1].for_values()
    share = 0.01 if scale > 1e-3 else 0.5  # where scales are coarse
    k, v = (
        (scale * torch.randn(rows, n, heads, width)).to(dtype).transpose(1, 2) for width in widths
    )
    position = torch.randint(0, 99, (rows, n) if padded else (n,), dtype=torch.int32)
    expected = joined(steps(key, k), "k") | joined(steps(value, v), "v")
    slots = 12
    planes = {
        name: torch.full((rows, heads, slots, *x.shape[3:]), 7).to(x.dtype)
        for name, x in expected.items()
    }
    planes[POSITION] = torch.full((rows, heads if per_head else 1, slots), -1, dtype=torch.int32)
    own_rows = rows if cursor in ("row", "head") else 1
    own_heads = heads if cursor == "head" and per_head else 1
    at = torch.randint(0, slots - n, (own_rows, own_heads, 1))
    first = 3 if cursor == "number" else at
    there = {name: x.to(DEVICE) for name, x in planes.items()}
    append(
        k.to(DEVICE), v.to(DEVICE), position.to(DEVICE), there,
        first if isinstance(first, int) else first.to(DEVICE), key, value,
    )  # fmt: skip
    index = (torch.full((1, 1, 1), 3) if cursor == "number" else at) + torch.arange(n)
    expected[POSITION] = (position if padded else position.expand(rows, n))[:, None]
    for name, plane in planes.items():
        own = index.expand(rows, plane.shape[1], n)
        own = own.reshape(*own.shape, *(1 for _ in plane.shape[3:])).expand(
            -1, -1, -1, *plane.shape[3:]
        )
        after = there[name].cpu()
        codec = {"k": key, "v": value}.get(name[0], Plain())
        alike(after.gather(2, own), expected[name].expand(own.shape), name, codec, share)
        assert after.scatter(2, own, plane.gather(2, own)).equal(plane)  # and nothing else


@pytest.mark.parametrize(
    ("codec", "bad"),
    every(2, product([c for c in CODECS if c != Plain()], [torch.nan, torch.inf, -torch.inf])),
)
def test_what_is_not_finite_shows(codec, bad):
    x = torch.randn(1, 1, 2, 64)
    x[0, 0, 1, 20] = bad
    expected = joined(steps(codec, x), "k") | joined(steps(codec.for_values(), x), "v")
    planes = {name: torch.zeros_like(p).to(DEVICE) for name, p in expected.items()}
    planes[POSITION] = torch.zeros(1, 1, 2, dtype=torch.int32).to(DEVICE)
    place = torch.arange(2).to(DEVICE)
    append(x.to(DEVICE), x.to(DEVICE), place, planes, 0, codec, codec.for_values())
    for name in expected:
        if name.endswith("_scale"):
            assert planes[name].cpu().isnan().equal(expected[name].isnan())


def test_what_it_cannot():
    x = torch.randn(1, 1, 1, 64, device=DEVICE)
    assert able(x, x, Int8(), Plain())
    assert not able(x, x, Kivi(), Kivi())
    assert not able(x, x, Int8(), Int3())
    assert not able(x, x, Int4(scale=8), Int8())
    assert not able(x.double(), x.double(), Plain(), Plain())
