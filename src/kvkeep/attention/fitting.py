"""Checks that queries fit a view, before a backend is chosen.

Kernels use addresses and strides without further checks, so malformed input must not reach them,
and all backends must agree about it. `attend` checks every call. Views of a `LayerCache` need no
check: their tensors were checked when they were written.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvkeep.attention.options import Options
from kvkeep.attention.view import Segment, View
from kvkeep.checks import (
    check_bias,
    check_memory,
    check_places,
    check_range,
    check_sinks,
    check_slopes,
    check_softcap,
    resolved,
)
from kvkeep.errors import ShapeError
from kvkeep.packing import PLAIN
from kvkeep.planes import LAST, POSITION, Reach, joined


def in_memory(q: Tensor, view: View, options: Options) -> tuple[Tensor, View, Options]:
    """The same call with all tensors in a form that kernels can read; see `checks.resolved`."""
    q = resolved(q)
    sinks, slopes, bias = (
        x if x is None else resolved(x) for x in (options.sinks, options.slopes, options.bias)
    )
    segments = list(view.segments)
    for index, segment in enumerate(segments):
        planes = {name: resolved(plane) for name, plane in segment.planes.items()}
        if any(plane is not segment.planes[name] for name, plane in planes.items()):
            segments[index] = segment._replace(planes=planes)
    bounds = view.bounds if view.bounds is None else resolved(view.bounds)
    view = view._replace(segments=tuple(segments), position=resolved(view.position), bounds=bounds)
    return q, view, options._replace(sinks=sinks, slopes=slopes, bias=bias)


def check_call(q: Tensor, view: View, options: Options) -> None:
    """Check that queries (B, Hq, n, Dk) fit a view, that its segments are well formed, and that all
    backends interpret the options alike.

    Raises:
        ShapeError: a check fails; names the tensor, its shape and the expected shape.
    """
    if q.dim() != 4 or 0 in q.shape or not q.is_floating_point():
        raise ShapeError(f"queries {tuple(q.shape)} {q.dtype}; give floats (B, Hq, n, Dk)")
    check_memory("queries", q, q.device)
    check_softcap(options.softcap)
    check_sinks(q, options.sinks)
    check_slopes(q, options.slopes)
    check_bias(q, options.bias)
    for name, x in (("sinks", options.sinks), ("slopes", options.slopes), ("bias", options.bias)):
        if x is not None:
            check_memory(name, x, q.device)
    for reach in view.reaches:
        _check_reach(reach)
    if not view.segments:
        raise ShapeError("a view without segments; give a segment with the chunk's own slots")
    rows, query_heads, n, width = q.shape
    in_parts = view.in_parts
    _check_parts(view, rows)
    check_places("positions of queries", view.position, rows, n)
    _check_values("positions of queries", view.position, q)
    if view.bounds is not None:
        check_places("bounds of queries", view.bounds, rows, n, 2)
        _check_values("bounds of queries", view.bounds, q)
    first = view.segments[0]
    own_heads = len({part.head for part in view.parts}) if in_parts else 1
    heads = _tensor(first, "k").shape[1]
    all_heads = own_heads * heads
    _tensor(first, first.value_name)
    if heads < 1 or query_heads % all_heads:
        raise ShapeError(
            f"{query_heads} query heads on {all_heads} kv heads: give a positive multiple of the "
            "kv heads, and at least one kv head"
        )
    if options.centre is not None:
        numbers, fits = options.centre.held, (rows, all_heads, 2, width)
        if tuple(numbers.shape) != fits or numbers.dtype is not torch.float32:
            raise ShapeError(
                f"a centre of {tuple(numbers.shape)} {numbers.dtype}; give float32 {fits}: rows, "
                "kv heads, the mean and the scales, and the width of keys"
            )
        check_memory("centre", numbers, q.device)
    value_width = first.value_width
    if value_width < 1:
        shape = tuple(first.planes[first.value_name].shape)
        raise ShapeError(f"values {shape}; give a width of at least 1")
    for index, segment in enumerate(view.segments):
        last = index == len(view.segments) - 1 or not view.common
        some = rows if segment.rows is None else len(segment.rows)
        held = heads if segment.part else all_heads
        own = n if last and view.bounds is None else 0
        _check_segment(f"segment {index}", segment, q, some, held, width, value_width, own)


def _check_parts(view: View, rows: int) -> None:
    """Check that parts come first and hold each row of each head exactly once."""
    segments, parts = view.segments, view.parts
    if not any(s.part or s.head is not None or s.rows is not None for s in segments):
        return
    held: dict[int | None, list[int]] = {}
    for segment in segments:
        if (segment.head or 0) < 0:
            raise ShapeError(f"a segment of head {segment.head}; heads are counted from 0")
        if segment.rows is not None and segment.rows.dtype not in (torch.int32, torch.int64):
            raise ShapeError(f"a segment of rows {segment.rows}; give integers (b,)")
        if segment.part:
            own = range(rows) if segment.rows is None else segment.rows.tolist()
            held.setdefault(segment.head, []).extend(own)
    heads = sorted(-1 if head is None else head for head in held)
    whole = all(sorted(own) == list(range(rows)) for own in held.values())
    first = all(segment.part for segment in segments[: len(parts)])
    served = all(s.head is None and s.rows is None for s in view.common)
    if not (whole and first and served and heads in ([], [-1], list(range(len(heads))))):
        raise ShapeError(
            f"segments of heads {[s.head for s in segments]}: give segments of all heads and rows, "
            "and before them parts (part=True) that hold each row of each head once"
        )


def _check_reach(reach: Reach) -> None:
    """Check that a reach consists of positions."""
    if not all(hasattr(x, "__index__") and 0 <= x <= LAST for x in reach):
        raise ShapeError(
            f"a window with {reach}: give whole numbers from 0 to {LAST}, or no window"
        )


def _check_values(what: str, x: Tensor, q: Tensor) -> None:
    check_memory(what, x, q.device)
    check_range(what, x)


def _check_segment(
    what: str,
    segment: Segment,
    q: Tensor,
    own_rows: int,
    heads: int,
    width: int,
    value_width: int,
    own: int,
) -> None:
    k = _tensor(segment, "k")
    rows, slots = k.shape[0], k.shape[2]
    if rows not in (1, own_rows):
        raise ShapeError(f"{what} holds {rows} rows, the queries {own_rows}; give 1 or {own_rows}")
    if segment.key_codec.block != segment.value_codec.block:
        raise ShapeError(
            f"{what}: keys and values are in blocks of different lengths; use one codec"
        )
    for name, codec, dim in (
        ("k", segment.key_codec, width),
        ("v", segment.value_codec, value_width),
    ):
        if not codec.of_keys:
            _tensor(segment, name)
        expected = joined(codec.planes(dim, q.dtype), name)
        for plane, spec in expected.items():
            x = _tensor(segment, plane)
            shape = (rows, heads, slots, *spec.shape)
            typed = x.is_floating_point() if codec.layout == PLAIN else x.dtype == spec.dtype
            if tuple(x.shape) != shape or not typed:
                kind = "floats" if codec.layout == PLAIN else spec.dtype
                raise ShapeError(
                    f"{what}: plane {plane!r} is {tuple(x.shape)} {x.dtype}, but queries "
                    f"{tuple(q.shape)} and the other planes need {shape} {kind}"
                )
            check_memory(f"{what}: plane {plane!r}", x, q.device)
    _check_places(what, segment, rows, heads, slots, q)
    if segment.slots < own:
        raise ShapeError(
            f"{what} holds {segment.slots} slots, fewer than the chunk's {own}; the last segment "
            "must end with the chunk's slots"
        )
    if segment.used is not None:
        if segment.used.numel() != 1 or segment.used.dtype != torch.int32:
            raise ShapeError(
                f"{what}: used is {tuple(segment.used.shape)} {segment.used.dtype}; give one "
                "number, int32 ()"
            )
        check_memory(f"{what}: used", segment.used, q.device)
    rotation = segment.rotation
    if rotation is not None and rotation.first + 2 * len(rotation.inv_freq) > width:
        raise ShapeError(
            f"{what} rotates {2 * len(rotation.inv_freq)} of {width} elements; give at most "
            f"{(width - rotation.first) // 2} frequencies"
        )


def _check_places(
    what: str, segment: Segment, rows: int, heads: int, slots: int, q: Tensor
) -> None:
    place, block = _tensor(segment, POSITION), segment.key_codec.block
    rest = () if block == 1 else (block,)
    fits = place.dim() == 3 + len(rest) and place.shape[0] == rows and place.shape[1] in (1, heads)
    if not fits or tuple(place.shape[2:]) != (slots, *rest) or place.dtype != torch.int32:
        raise ShapeError(
            f"{what}: positions are {tuple(place.shape)} {place.dtype}; give int32 "
            f"{(rows, 1, slots, *rest)} or {(rows, heads, slots, *rest)}"
        )
    check_memory(f"{what}: positions", place, q.device)


def _tensor(segment: Segment, name: str) -> Tensor:
    """A required plane of a segment."""
    x = segment.planes.get(name)
    if x is None or x.dim() < 3:
        there = {n: tuple(segment.planes[n].shape) for n in segment.planes}
        raise ShapeError(f"a segment needs a plane {name!r} (B, H, S, ...); it has {there}")
    return x
