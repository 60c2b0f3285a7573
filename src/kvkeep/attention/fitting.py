"""Checks that queries fit a view, before anything is computed.

Kernels take addresses and strides without further checks, so malformed input must not reach them.
`attend` checks every call. The views of a `LayerCache` need no check: they consist of tensors that
were checked when they were written.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvkeep.attention.view import Segment, View
from kvkeep.checks import check_sinks
from kvkeep.errors import ShapeError
from kvkeep.packing import PLAIN
from kvkeep.planes import POSITION, joined, part


def check_call(q: Tensor, view: View, sinks: Tensor | None) -> None:
    """Check that queries (B, Hq, n, Dk) fit a view, and that each of its segments is well formed.

    Raises:
        ShapeError: they do not; names the tensor, its shape and the expected one.
    """
    if q.dim() != 4 or 0 in q.shape or not q.is_floating_point():
        raise ShapeError(f"queries {tuple(q.shape)} {q.dtype}; give floats (B, Hq, n, Dk)")
    check_sinks(q, sinks)
    if not view.segments:
        raise ShapeError("a view without segments; give one that holds the chunk's own slots")
    rows, query_heads, n, width = q.shape
    in_parts = view.in_parts
    _check_parts(view, rows)
    _check_position(view, rows, n)
    first = view.segments[0]
    own_heads = len({segment.head for segment in view.segments}) if in_parts else 1
    heads = _tensor(first, "k").shape[1]
    _tensor(first, "v")
    if query_heads % (own_heads * heads):
        raise ShapeError(
            f"{query_heads} query heads on {own_heads * heads} kv heads: give a multiple of the kv "
            "heads"
        )
    value_width = first.value_codec.width(part(first.planes, "v"))
    for index, segment in enumerate(view.segments):
        last = view.bounds is None and (in_parts or index == len(view.segments) - 1)
        own = rows if segment.rows is None else len(segment.rows)
        what = f"segment {index}"
        _check_segment(what, segment, q, own, heads, width, value_width, n if last else 0)


def _check_parts(view: View, rows: int) -> None:
    """Check that either all segments are parts or none is, and that parts hold each row of each
    head once."""
    segments = view.segments
    held: dict[int | None, list[int]] = {}
    for segment in segments:
        own = range(rows) if segment.rows is None else segment.rows.tolist()
        held.setdefault(segment.head, []).extend(own)
    heads = sorted(-1 if head is None else head for head in held)
    parts = [segment.part for segment in segments]
    whole = view.in_parts and all(sorted(own) == list(range(rows)) for own in held.values())
    if not any(parts):
        whole = all(s.head is None and s.rows is None for s in segments)
    if len(set(parts)) > 1 or not whole or heads not in ([-1], list(range(len(heads)))):
        raise ShapeError(
            f"segments of heads {[s.head for s in segments]}: give segments of all heads and rows, "
            "or parts (part=True) that hold each row of each head once"
        )


def _check_position(view: View, rows: int, n: int) -> None:
    position, bounds = view.position, view.bounds
    fitting = ((n,), (rows, n))
    if tuple(position.shape) not in fitting or _fractional(position):
        raise ShapeError(
            f"positions of queries {tuple(position.shape)} {position.dtype} for {rows} rows of {n} "
            f"queries; give integers {fitting[0]} or {fitting[1]}"
        )
    if bounds is not None:
        limits = ((2, n), (rows, 2, n))
        if tuple(bounds.shape) not in limits or _fractional(bounds):
            raise ShapeError(
                f"bounds of queries {tuple(bounds.shape)} {bounds.dtype} for {rows} rows of {n} "
                f"queries; give integers {limits[0]} or {limits[1]}"
            )


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
        raise ShapeError(f"{what} holds {rows} rows, the queries {own_rows}; give 1 or as many")
    if segment.key_codec.block != segment.value_codec.block:
        raise ShapeError(
            f"{what}: keys and values are in blocks of different lengths; use one codec"
        )
    for name, codec, dim in (
        ("k", segment.key_codec, width),
        ("v", segment.value_codec, value_width),
    ):
        _tensor(segment, name)
        expected = joined(codec.planes(dim, q.dtype), name)
        for plane, spec in expected.items():
            found = _tensor(segment, plane)
            shape = (rows, heads, slots, *spec.shape)
            typed = (
                found.is_floating_point() if codec.layout == PLAIN else found.dtype == spec.dtype
            )
            if tuple(found.shape) != shape or not typed:
                kind = "floats" if codec.layout == PLAIN else spec.dtype
                raise ShapeError(
                    f"{what}: plane {plane!r} is {tuple(found.shape)} {found.dtype}, but queries "
                    f"{tuple(q.shape)} and the other planes need {shape} {kind}"
                )
            _check_device(what, plane, found, q)
    _check_places(what, segment, rows, heads, slots, q)
    if segment.slots < own:
        raise ShapeError(
            f"{what} holds {segment.slots} slots, fewer than the {own} of the chunk, with which "
            "the last segment must end"
        )
    if segment.used is not None and segment.used.numel() != 1:
        raise ShapeError(f"{what}: used is {tuple(segment.used.shape)}; give one number, int32 ()")
    rotation = segment.rotation
    if rotation is not None and 2 * len(rotation.inv_freq) > width:
        raise ShapeError(
            f"{what} rotates {2 * len(rotation.inv_freq)} of {width} elements; give at most "
            f"{width // 2} frequencies"
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
    _check_device(what, POSITION, place, q)


def _tensor(segment: Segment, name: str) -> Tensor:
    """A required plane of a segment."""
    found = segment.planes.get(name)
    if found is None or found.dim() < 3:
        there = {n: tuple(segment.planes[n].shape) for n in segment.planes}
        raise ShapeError(f"a segment needs a plane {name!r} (B, H, S, ...); it has {there}")
    return found


def _check_device(what: str, name: str, plane: Tensor, q: Tensor) -> None:
    if plane.device != q.device:
        raise ShapeError(
            f"{what}: plane {name!r} is on {plane.device}, the queries on {q.device}; move one"
        )


def _fractional(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex() or x.dtype == torch.bool
