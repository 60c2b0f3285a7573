"""Segments that follow each other give, to the last bit, what their slots give in one place."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvkeep.attention import Options, Segment, View, backends
from kvkeep.attention.native import available
from kvkeep.codec import Fp8, Int3, Int4, Int6, Int8, Kivi, Plain
from kvkeep.planes import POSITION, Reach, joined

CODECS = [Plain(), Int8(), Int4(), Int4(affine=True, group=8), Fp8(), Int3(16, scale=8), Int6()]
CODECS += [Kivi(4, together=24), Kivi(2, together=5)]  # blocks that no tile of slots begins with
BACKENDS = {b.name: b.run for b in backends()}


def cut(planes, places, key, value):
    """Segments of the slots between `places`, each in memory of its own."""
    bounds = [0, *sorted(places), planes["k"].shape[2]]
    return tuple(
        Segment({n: p[:, :, a:b].clone() for n, p in planes.items()}, key, value)
        for a, b in pairwise(bounds)
        if b > a
    )


@settings(max_examples=90, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    codec=st.sampled_from(CODECS),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    slots=st.sampled_from([2, 40, 64, 65, 130, 700, 2100]),
    cuts=st.lists(st.floats(0, 1), min_size=1, max_size=6),
    n=st.sampled_from([1, 1, 2, 9]),
    group=st.sampled_from([1, 3, 4]),
    rows=st.integers(1, 3),
    shared=st.booleans(),
    pads=st.sampled_from([None, 0, 5]),
    reach=st.sampled_from([None, (30, 2)]),
    mass=st.booleans(),
    threads=st.sampled_from([1, 2]),
)
def test_chain(seed, codec, dtype, slots, cuts, n, group, rows, shared, pads, reach, mass, threads):
    torch.manual_seed(seed)
    block = codec.block
    slots = -(-slots // block) * block
    n = min(n, slots)
    batch = 1 if shared else rows
    q = torch.randn(rows, 2 * group, n, 64, dtype=dtype)
    k, v = (torch.randn(batch, 2, slots, 64, dtype=dtype) for _ in range(2))
    key, value = codec, codec.for_values()
    planes = joined(key.encode(k), "k") | joined(value.encode(v), "v")
    place = torch.arange(slots, dtype=torch.int32).expand(batch, 1, slots).clone()
    if pads is not None:
        place[:, :, : min(pads, slots - n)] = -1
    planes[POSITION] = place if block == 1 else place.unflatten(2, (-1, block))
    reaches = () if reach is None else (Reach(*reach),)
    whole = View(cut(planes, [], key, value), torch.arange(slots - n, slots), pads is not None)
    whole = whole._replace(reaches=reaches)
    places = [int(x * (slots - n)) // block for x in cuts]
    chain = whole._replace(segments=cut(planes, places, key, value))
    options = Options(0.2, None, None, mass, None)
    names = ["native"] if codec.name != "fp8" else ["reference"] if mass else ["reference", "sdpa"]
    assume(available or "native" not in names)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for name in names:
            out, got = BACKENDS[name](q, chain, options)
            expected, expected_mass = BACKENDS[name](q, whole, options)
            assert out.equal(expected)
            assert got is expected_mass is None or got.equal(expected_mass)
    finally:
        torch.set_num_threads(before)


def test_only_alike_segments_follow():
    planes = {"k": torch.zeros(1, 2, 4, 8), "v": torch.zeros(1, 2, 4, 8)}
    planes[POSITION] = torch.zeros(1, 1, 4, dtype=torch.int32)
    first = Segment(planes, Plain(), Plain())
    assert first.follows(first)
    assert not first.follows(None)
    assert not first.follows(first._replace(key_codec=Int8()))
    assert not first.follows(first._replace(planes=planes | {"k": planes["k"].bfloat16()}))
    rows = {name: plane.expand(3, *plane.shape[1:]) for name, plane in planes.items()}
    assert not first._replace(planes=rows).follows(first)
