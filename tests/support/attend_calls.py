"""Calls of `attend` to try kernels with, and what the reference makes of them in float64."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from kvkeep.attention import Rotation, Segment, View, reference
from kvkeep.attention.options import Options
from kvkeep.codec import Codec, Int2, Int3, Int4, Int5, Int6, Int8, Kivi, Plain
from kvkeep.packing import PACKINGS, KernelLayout
from kvkeep.planes import POSITION, PlaneSpec, Reach, joined


class ByChannel(Codec):
    """A codec of a user's: 8 bits by channel, for values too, and without zeros."""

    name = "by_channel"
    block = 48
    layout = KernelLayout("int8", 1, block=48)

    def planes(self, dim, dtype):
        return {
            "": PlaneSpec((48, dim), torch.int8),
            "_scale": PlaneSpec((1, dim), torch.float16),
        }

    def encode(self, x):
        x = x.unflatten(2, (-1, 48)).float()
        scale = (x.abs().amax(dim=3, keepdim=True) / 127).half()
        return {"": (x / scale).round().to(torch.int8), "_scale": scale}

    def decode(self, planes, dtype):
        return (planes[""].to(dtype) * planes["_scale"].to(dtype)).flatten(2, 3)


DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def segment(k, v, position, rotation=None, key=Plain(), value=Plain()):  # noqa: B008
    value = value.for_values()
    planes = joined(key.encode(k), "k") | joined(value.encode(v), "v")
    place = torch.as_tensor(position, dtype=torch.int32)
    place = place.view(-1 if k.shape[2] else 1, 1, k.shape[2]).expand(k.shape[0], 1, -1)
    if key.block > 1:
        place = place.unflatten(2, (-1, key.block))
    return Segment(planes | {POSITION: place}, key, value, rotation)


def segments(k, v, position, rotation, key, value, own=0):
    """Tokens as a layer holds them: whole blocks of a codec that encodes blocks, and the others
    plain, with the newest `own`."""
    whole = k.shape[2] if key.block == 1 else (k.shape[2] - own) // key.block * key.block
    first, rest = (slice(None, whole), key, value), (slice(whole, None), Plain(), Plain())
    return [
        segment(k[:, :, part], v[:, :, part], position[..., part], rotation, *codecs)
        for part, *codecs in ([first, rest] if key.block > 1 else [first])
        if k[:, :, part].shape[2] or key.block == 1
    ]


def exactly(q, view, options):
    """The reference in float64, on what the kernel was given."""

    def double(x):
        planes = {
            n: p.double() if n in "kv" and p.is_floating_point() else p for n, p in x.planes.items()
        }
        return Segment(planes, x.key_codec, x.value_codec, x.rotation)

    exact = view._replace(segments=tuple(map(double, view.segments)))
    return reference.run(q.double(), exact, options)


def dense(k, v, n, **codecs):
    """One segment; of a codec that encodes blocks, without the oldest tokens that fill none."""
    left = k.shape[2] % codecs.get("key", Plain()).block
    k, v = k[:, :, left:], v[:, :, left:]
    place = torch.arange(k.shape[2])
    return View((segment(k, v, place, **codecs),), place[-n:], ragged=False)


def qkv(rows=1, heads=2, group=2, slots=100, n=1, width=64, values=None, dtype=torch.float32):
    return (
        torch.randn(rows, heads * group, n, width, dtype=dtype),
        torch.randn(rows, heads, slots, width, dtype=dtype),
        torch.randn(rows, heads, slots, values or width, dtype=dtype),
    )


def not_a_number(plane):
    """NaN as a number of a plane of floats or scales, of which uint8 has the higher half."""
    return 0x7E if plane.dtype is torch.uint8 else torch.nan


PLAIN = st.just(Plain())
CODECS = st.one_of(
    PLAIN,
    st.builds(Int8, group=st.sampled_from([64, 32, 8, 256]), hadamard=st.booleans()),
    st.builds(
        Int4,
        group=st.sampled_from([32, 64, 8, 128]),
        affine=st.booleans(),
        hadamard=st.booleans(),
    ),
    st.builds(
        lambda kind, group, scale: kind(group, scale=scale if kind.bits <= 4 else 16),
        kind=st.sampled_from([Int6, Int5, Int4, Int3, Int2]),
        group=st.sampled_from([32, 64, 16, 8]),
        scale=st.sampled_from([16, 8]),
    ),
)

BLOCKS = st.builds(
    Kivi,
    bits=st.sampled_from([4, 4, 2]),
    together=st.sampled_from([32, 64, 24, 5, 128]),
    group=st.sampled_from([32, 64, 8]),
).map(lambda codec: (codec, codec))
"""Of keys and values: tokens of more than a tile, fewer, and odd numbers of them."""


KINDS = [
    (Int8(), Int8()),
    (Int4(), Int4()),
    (Int4(affine=True), Int4(64)),
    (Int8(32, hadamard=False), Plain()),
    (Plain(), Int4(affine=True)),
    (Int4(8), Int8(8)),
    (Int3(), Int2()),
    (Int6(), Int5(64)),
    (Int4(scale=8), Int3(scale=8)),
    (Kivi(), Kivi()),
    (Kivi(2, together=16), Kivi(2, together=16)),
]

FEATURES = {
    "seed": st.integers(0, 2**16),
    "rows": st.integers(1, 3),
    "heads": st.integers(1, 3),
    "group": st.sampled_from([1, 2, 3, 4, 5, 7, 8, 12]),
    "past": st.sampled_from([0, 1, 17, 63, 64, 65, 300, 900]),
    "shared": st.sampled_from([0, 0, 1, 70, 200]),
    "n": st.sampled_from([1, 1, 1, 2, 5, 16, 40]),
    "pads": st.sampled_from([None, 0, 1, 5, 80]),
    "reach": st.sampled_from([None, (5, 0), (64, 3), (200, 4)]),
    "window": st.sampled_from([None, 33]),
    "bounds": st.sampled_from([None, None, None, "of each row", "of all rows"]),
    "softcap": st.sampled_from([None, 3.0, 30.0]),
    "with_sinks": st.booleans(),
    "with_slopes": st.booleans(),
    "distances": st.sampled_from([0, 0, 1, 20, 400]),
    "rotated": st.booleans(),
    "need_mass": st.booleans(),
    "observed": st.sampled_from([None, None, 0, 1, 3, 20]),
    "peak": st.sampled_from([False, False, True]),
    "width": st.sampled_from([32, 40, 64, 80, 96, 128, 256, 7]),
    "values": st.sampled_from([32, 64, 72, 128, 9]),
    "codecs": st.one_of(st.tuples(PLAIN, PLAIN), st.tuples(CODECS, CODECS), BLOCKS),
    "dtype": st.sampled_from(DTYPES),
}
"""What a call may have, all of it together."""


def call(
    *,
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
    rotated,
    need_mass,
    observed,
    peak,
    width,
    values,
    codecs,
    dtype,
):
    """Queries, a view and options of these features."""
    generator = torch.Generator().manual_seed(seed)
    key, value = codecs
    width += -width % PACKINGS[key.layout.packing].together
    values += -values % PACKINGS[value.layout.packing].together

    def random(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    length = past + n
    position = torch.arange(shared, shared + length).expand(rows, -1).clone()
    if pads:
        position[0] -= pads
        position[0, : min(pads, length)] = -1
    k, v = random(rows, heads, length, width), random(rows, heads, length, values)
    held = segments(k, v, position, None, key, value, n)
    if shared:
        rotation = (
            Rotation(11, 100.0 ** -torch.arange(0, 1, 2 / (width // 2 * 2))) if rotated else None
        )
        k, v = random(1, heads, shared, width), random(1, heads, shared, values)
        held = segments(k, v, torch.arange(shared), rotation, key, value) + held
    reaches = [Reach(*reach)] if reach else []
    if window:
        reaches.append(Reach(window))
    own = position[:, past:]
    limits = None
    if bounds:  # before and behind each query
        first, last = (
            torch.randint(*x, own.shape, generator=generator) for x in ((0, 90), (-3, 6))
        )
        limits = torch.stack([own - first, (own + last).masked_fill(own < 0, -1)], dim=1)
        limits = limits if bounds == "of each row" else limits[-1]
    queries = own if pads is not None else own[0]
    view = View(tuple(held), queries, pads is not None, tuple(reaches), limits)
    sinks = random(heads * group).float() if with_sinks else None
    slopes = random(heads * group).float() / 8 if with_slopes else None
    bias = random(rows, heads * group, n, distances) if distances else None
    q = random(rows, heads * group, n, width)
    options = Options(width**-0.5, softcap, sinks, need_mass, observed, peak, slopes)
    return q, view, options._replace(bias=bias)


def lain(x):
    """The same numbers wherever planes lie: with spare slots behind, heads inside slots, rows of
    odd addresses, in wider slots, and along a width whose stride is not 1."""
    count = x.shape[2]
    yield torch.cat([x, torch.full_like(x, 77)], dim=2)[:, :, :count]
    yield x.transpose(1, 2).contiguous().transpose(1, 2)
    yield torch.cat([x.new_zeros(1), x.flatten()])[1:].view_as(x)
    yield torch.cat([x, x], dim=-1)[..., : x.shape[-1]]
    yield x.transpose(2, -1).contiguous().transpose(2, -1)


def everywhere(whole):
    """A segment, with its planes wherever they may lie."""
    names = [name for name in whole.planes if name != POSITION]
    for places in zip(*(lain(whole.planes[name]) for name in names), strict=True):
        yield whole._replace(planes={**whole.planes, **dict(zip(names, places, strict=True))})
