"""The native CPU backend: one pass of C++ over the slots, without copying.

It reads keys and values of float32, bfloat16 and float16, and codes of 8 bits and fewer, through
pointers and strides (see `native/abi.h`). It uses torch's OpenMP threads and the best available of
AVX-512, AVX2 and portable code. If no C++ compiler is present at installation, kvkeep installs
without this backend and uses the other backends.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct

import torch
from torch import Tensor

from kvkeep.attention import sdpa
from kvkeep.attention.centre import Centre
from kvkeep.attention.options import Options
from kvkeep.attention.view import Segment, View
from kvkeep.checks import wants_gradients
from kvkeep.choice import rounded, torch_is_faster
from kvkeep.native_library import (  # noqa: F401 - imported from here by tests and tools
    LIBRARY,
    TYPES,
    address_of,
    available,
    instructions,
    reason,
    use_instructions,
)
from kvkeep.packing import HIGH_HALF, PACKINGS, KernelLayout
from kvkeep.planes import POSITION, Planes, unsliced

_MOST_WIDTH = 512  # MOST_WIDTH of native/codes.h

# Layouts of KvCall, KvSegment, KvReach and KvCentre in native/abi.h; absent pointers are 0.
CALL, _SEGMENT, REACH = Struct("=38q2d"), Struct("=49q"), Struct("=4q")
_CENTRE = Struct("=14q")


def refuses(q: Tensor, view: View, options: Options) -> str | None:
    """The reason why the kernel does not support this call, or None."""
    if not q.is_cpu:
        return "the native kernel runs on the CPU only"
    if q.dtype not in TYPES:
        return f"the native kernel computes in float32, less precise than {q.dtype}"
    if view.chosen is not None:
        return "the native kernel does not support a choice of slots per query"
    if options.bias is not None and wants_gradients(options.bias):
        return "the native kernel has no gradients"
    if torch.compiler.is_compiling():
        return "the native kernel reads pointers, and tensors have none while tracing"
    for segment in view.segments:
        unread = _unread(q, segment)
        if unread is not None:
            return unread
    return None


def yields(q: Tensor, view: View, options: Options) -> bool:
    """Whether torch's attention computes the call faster (`kvkeep.choice`). Only dense views of one
    plain segment are measured."""
    segment = view.segments[0]
    if len(view.segments) > 1 or not view.dense or not segment.plain or options.need_mass:
        return False
    if torch.compiler.is_compiling():
        return False
    group, slots = q.shape[1] // unsliced(segment.planes)["k"].shape[1], segment.slots
    sizes = rounded(view.chunk), rounded(slots), group, q.shape[3]
    faster = torch_is_faster("attention", q.dtype, *sizes)
    return faster and sdpa.refuses(q, view, options) is None


def _unread(q: Tensor, segment: Segment) -> str | None:
    """The reason why the kernel cannot read a segment, or None."""
    planes = unsliced(segment.planes)
    k, v = planes["k"], planes[segment.value_name]
    for codec, plane in ((segment.key_codec, k), (segment.value_codec, v)):
        layout = codec.layout
        if layout is None or not PACKINGS[layout.packing].native:
            return f"the native kernel cannot read codes of {codec}"
        if layout.packing == "plain" and plane.dtype not in TYPES:
            return f"the native kernel cannot read {plane.dtype}"
    return "the native kernel has no gradients" if wants_gradients(q, k, v) else None


def reads(q: Tensor, segment: Segment) -> bool:
    """Whether the kernel can read this segment in place, for queries like q."""
    layout = segment.key_codec.layout
    turned = layout is not None and layout.hadamard and q.shape[3] > _MOST_WIDTH
    return q.dtype in TYPES and not turned and _unread(q, segment) is None


def run(q: Tensor, view: View, options: Options) -> tuple[Tensor, Tensor | None]:
    """Attention of q (B, Hq, n, Dk) over the view, in q's dtype; sums are float32."""
    assert LIBRARY is not None
    rows, _, n, _ = q.shape
    last = view.segments[-1]
    heads, value_width = unsliced(last.planes)["k"].shape[1], last.value_width
    out = new_output(q, value_width)
    mass = observed = None
    if options.need_mass:
        mass = torch.zeros(rows, heads, view.slots, dtype=torch.float32)
        observed = view.observed(options.observed)
    dense = view.dense
    kept: list[Tensor] = []  # keeps temporary tensors alive during the call
    slopes = None if options.slopes is None else options.slopes.float().contiguous()
    bias = None if options.bias is None else options.bias.float()
    bias = bias if bias is None or bias.stride(3) == 1 else bias.contiguous()
    centre = None
    if options.centre is not None:
        q = options.centre.queries(q)
        kept.append(q)
        centre = pack_centre(options.centre, q, kept)
    placed = not dense or any(x is not None for x in (slopes, bias, centre))
    segments = pack_segments(view.segments, q, kept, placed=placed)
    reaches = b"".join([REACH.pack(*reach) for reach in view.reaches])
    position = view.position.to(torch.int32).contiguous() if placed else None
    bounds = None if view.bounds is None else view.bounds.to(torch.int32).contiguous()
    sinks = None if options.sinks is None else options.sinks.float().contiguous()
    given = (
        *map(_at, (position, bounds, sinks, slopes, bias)),
        0 if centre is None else address_of(centre),
        *(out.data_ptr(), _at(mass), 0, 0, _at(observed)),
    )
    numbers = (
        *(len(view.segments), len(view.reaches)),
        n if position is not None and position.dim() == 2 else 0,
        2 * n if bounds is not None and bounds.dim() == 3 else 0,
        n if observed is not None and observed.shape[0] > 1 else 0,
        0 if observed is None else _first(observed),
        options.peak,
        *((0, 0, 0, 0) if bias is None else (*bias.stride()[:3], bias.shape[3])),
    )
    call = CALL.pack(*_call(q, heads, value_width, given, numbers, dense, options))
    if LIBRARY.kv_attend(call, segments, reaches):
        raise MemoryError(f"no scratch memory for attention over {view.slots} slots")
    return out, mass


def new_output(q: Tensor, width: int) -> Tensor:
    """An empty tensor (B, Hq, n, width) for queries (B, Hq, n, Dk), stored as (B, n, Hq, width),
    the layout that models read next."""
    rows, heads, n, _ = q.shape
    token = heads * width
    return q.new_empty_strided((rows, heads, n, width), (n * token, width, token, 1))


def _at(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def _call(
    q: Tensor,
    heads: int,
    value_width: int,
    given: tuple[int, ...],
    numbers: tuple[int, ...],
    dense: bool,
    options: Options,
) -> tuple[float, ...]:
    """The fields of a KvCall. `given`: from `position` to `observed`; `numbers`: from
    `segment_count` to `bias_columns`."""
    rows, query_heads, n, key_width = q.shape
    token = query_heads * value_width
    shape = n * token, value_width, token, TYPES[q.dtype], rows, heads, query_heads // heads, n
    ways = key_width, value_width, dense, torch.get_num_threads(), options.scale
    return *(0,) * 4, *given, *numbers, *shape, *ways, options.softcap or 0.0


def call_of_step(
    q: Tensor, heads: int, value_width: int, segments: int, options: Options, centre: int
) -> tuple[float, ...]:
    """The fields of a KvCall for one token per row that sees all slots; the fields of `out` and of
    the segments are 0. `options` must have no sinks, bias and mass; its slopes, contiguous float32,
    must stay alive as long as the call. `centre`: the address of a packed KvCentre, or 0."""
    given = 0, 0, 0, _at(options.slopes), 0, centre, *(0,) * 5
    return _call(q, heads, value_width, given, (segments, *(0,) * 10), True, options)


def pack_centre(centre: Centre, q: Tensor, kept: list[Tensor]) -> bytes:
    """Pack a centre for queries q (B, Hq, n, Dk), multiplied by its scales, as a KvCentre; `kept`
    keeps its tensors alive."""
    held, turns = centre.held.contiguous(), centre.turns
    kept += [held, turns.table, turns.near.numbers]
    return _CENTRE.pack(
        *(held.data_ptr(), *held.stride()[:2]),
        *(turns.table.data_ptr(), turns.near.numbers.data_ptr(), turns.near.rows),
        *(len(turns.table), turns.pairs, turns.interleaved),
        *_plane(q, False, kept),
    )


def _first(observed: Tensor) -> int:
    """The index of the first query observed in any row; n if none is."""
    some = observed.any(dim=0)
    return int(some.to(torch.uint8).argmax()) if some.any() else observed.shape[1]


def pack_segments(
    segments: Sequence[Segment], q: Tensor, kept: list[Tensor], *, placed: bool = True
) -> bytes:
    """Pack segments as KvSegments, with their positions if `placed`; append the temporary tensors
    they point to to `kept`."""
    before: list[Segment | None] = [None, *segments]
    return b"".join(
        [
            _segment(segment, q, placed, kept, segment.follows(previous))
            for segment, previous in zip(segments, before, strict=False)
        ]
    )


def _segment(segment: Segment, q: Tensor, placed: bool, kept: list[Tensor], follows: bool) -> bytes:
    planes = unsliced(segment.planes)
    key, value = segment.key_codec.layout, segment.value_codec.layout
    assert key is not None  # `refuses` rejects codecs without a layout
    assert value is not None
    rotates = key.hadamard and q.shape[3] <= _MOST_WIDTH  # the kernel rotates the queries itself
    shared = planes["k"].shape[0] != q.shape[0]
    # Rotated queries stay in float32, so that a rotary offset costs no precision.
    turned = q if segment.rotation is None else segment.queries(q.float())
    if not rotates:
        turned = segment.key_codec.rotate(turned)
    position = (0, 0, 0, 0, 0)
    if placed:
        place = planes[POSITION].flatten(2)
        kept.append(place)
        row, head, slot = place.stride()
        row, head = 0 if shared else row, head if place.shape[1] > 1 else 0
        position = (place.data_ptr(), row, head, slot, 0)
    return _SEGMENT.pack(
        *_encoded(planes, "k", key, shared, kept),
        rotates,
        *_encoded(planes, segment.value_name, value, shared, kept),
        value.hadamard,
        *position,
        *_plane(turned, False, kept),
        segment.slots,
        shared,
        follows,
    )


_ABSENT = (0, 0, 0, 0, 0)


def _encoded(
    planes: Planes, name: str, layout: KernelLayout, shared: bool, kept: list[Tensor]
) -> tuple[int, ...]:
    """A KvEncoded."""
    plane = planes[name]
    if layout.packing == "plain":
        return (*_plane(plane, shared, kept), *_ABSENT, *_ABSENT, 0, 1)
    zero = planes.get(name + "_zero")
    return (
        *_plane(plane, shared, kept, PACKINGS[layout.packing].number),
        *_plane(planes[name + "_scale"], shared, kept, HIGH_HALF if layout.scale == 8 else None),
        *(_ABSENT if zero is None else _plane(zero, shared, kept)),
        layout.group,
        layout.block,
    )


def _plane(
    x: Tensor, shared: bool, kept: list[Tensor], kind: int | None = None
) -> tuple[int, int, int, int, int]:
    if x.dim() == 5:  # slots of several tokens: make each token a slot
        row, head, slot, token, width = x.stride()
        slot, apart = (slot, False) if x.shape[3] == 1 else (token, slot != token * x.shape[3])
    else:
        row, head, slot, width = x.stride()
        apart = False
    if width != 1 or apart:
        x = (x.flatten(2, 3) if x.dim() == 5 else x).contiguous()
        row, head, slot, _ = x.stride()
    kept.append(x)
    return x.data_ptr(), 0 if shared else row, head, slot, TYPES[x.dtype] if kind is None else kind
