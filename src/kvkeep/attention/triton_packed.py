"""Attention for one token of each of several sequences, in one launch of a Triton kernel.

The launch has a table of work items. An item is a range of slots of one segment, and all sequences
that share this segment; its slots are read once for all of them. Items have nearly equal lengths,
so that a long sequence does not delay the other sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvkeep.attention import tiles
from kvkeep.attention.options import Options
from kvkeep.attention.tiles import power_of_two
from kvkeep.attention.triton import (
    Coded,
    coded_tile,
    kernel_type,
    on_device_of,
    readable,
    refuses,
    warps,
)
from kvkeep.attention.view import Segment, View
from kvkeep.packing import KernelLayout
from kvkeep.planes import unsliced

_FEWEST_TILES = 4  # tiles per item, unless its segment has fewer
_ITEMS = 2  # items per program that runs at once
_MOST_SLOTS = 1 << 30


def refuses_packed(q: Tensor, views: Sequence[View], options: Options) -> str | None:
    """The reason why one launch cannot serve all sequences, or None.

    Args:
        q: (1, Hq, sequences, Dk).
        views: the view of each sequence's token.
    """
    if options.need_mass:
        return "the mass is computed sequence by sequence"
    odd = (options.sinks, options.slopes, options.bias, options.centre)
    if any(x is not None for x in odd):
        return "sinks, slopes, biases and centres are computed sequence by sequence"
    for index, view in enumerate(views):
        reason = refuses(q[:, :, index : index + 1], view, options)
        if reason is not None:
            return reason
        if not view.dense or view.in_parts or view.position.numel() != 1:
            return "a sequence does not see all of its slots"
        for segment in view.segments:
            if segment.rotation is not None or segment.used is not None:
                return "a segment is rotated, or only the device knows its length"
            if readable(segment.key_codec) is None or _values(segment) is None:
                return "a segment must be decoded first"
            if unsliced(segment.planes)["k"].shape[0] != 1:
                return "a segment has several rows"
    return None


def _values(segment: Segment) -> KernelLayout | None:
    layout = readable(segment.value_codec, values=True)
    return None if layout is None or layout.hadamard else layout


class _Run(NamedTuple):
    """A segment, and the sequences that attend to it."""

    segment: Segment
    k: Coded
    v: Coded
    rows: list[int]


def run_packed(q: Tensor, views: Sequence[View], options: Options) -> Tensor:
    """Attention of q (1, Hq, sequences, Dk), each token over its own view: (1, Hq, sequences, Dv)
    in q's dtype; sums are float32."""
    with on_device_of(q):
        return _Packed(q, views, options).run()


class _Packed:
    """The launches of a call: one for each encoding, and one that merges the results."""

    def __init__(self, q: Tensor, views: Sequence[View], options: Options) -> None:
        self.q, self.options = q, options
        _, self.query_heads, self.rows, _ = q.shape
        first = views[0].segments[-1]
        self.heads = unsliced(first.planes)["k"].shape[1]
        self.group, self.width = self.query_heads // self.heads, first.value_width
        self.kinds: dict[object, list[_Run]] = {}
        known: dict[object, _Run] = {}
        for row, view in enumerate(views):
            for segment in view.segments:
                if segment.slots:
                    self._add(segment, row, known)
        self.parts = [0] * self.rows  # number of parts of each sequence so far

    def _add(self, segment: Segment, row: int, known: dict[object, _Run]) -> None:
        planes = unsliced(segment.planes)
        held = planes["k"], planes[segment.value_name]
        place = *(plane.data_ptr() for plane in held), segment.slots
        if place in known:
            known[place].rows.append(row)
            return
        token_planes, keys, values = segment.token_planes, readable(segment.key_codec), None
        values = _values(segment)
        assert keys is not None  # `refuses_packed` has checked it
        assert values is not None
        k = Coded.of(token_planes, "k", keys, self.q.shape[3])
        v = Coded.of(token_planes, segment.value_name, values, segment.value_width)
        known[place] = run = _Run(segment, k, v, [row])
        kind = (
            *(tuple(x.shape(name).items()) for name, x in (("K", k), ("V", v))),
            *((x.plane.dtype, x.plane.stride(2), x.scale.stride(2), x.block) for x in (k, v)),
            keys.hadamard,
        )
        self.kinds.setdefault(kind, []).append(run)

    def run(self) -> Tensor:
        from kvkeep.kernels import merge

        prepared = [self._items(runs) for runs in self.kinds.values()]
        parts, queries = max(self.parts), self.rows * self.query_heads
        shape = parts, self.rows, self.query_heads
        out = self.q.new_empty((*shape, self.width), dtype=torch.float32)
        lse = out.new_full(shape, -torch.inf)
        for runs, (items, rows, tile) in zip(self.kinds.values(), prepared, strict=True):
            self._attend(runs, items, rows, tile, out, lse)
        whole = self.q.new_empty((1, self.rows, self.query_heads, self.width))
        wide, all_lse = power_of_two(self.width), lse.new_empty(lse.shape[1:])
        merge.merge[(queries,)](
            out, lse, whole, all_lse, parts, queries, DV=self.width, WIDE=wide, BLOCK=16,
            num_warps=4,
        )  # fmt: skip
        return whole.transpose(1, 2)

    def _items(self, runs: Sequence[_Run]) -> tuple[list[list[int]], list[int], dict[str, Any]]:
        """The work items of one launch, the rows that they refer to, and the tile constants."""
        k, v = runs[0].k, runs[0].v
        exact = self._kind(k, v) == torch.float32
        few, many = sorted((power_of_two(k.groups), power_of_two(v.groups)))
        lines = self.group * max(len(run.rows) for run in runs)
        most = min(16, 64 // many) if exact else min(64, 128 // many)
        block_m = max(16 // few, min(power_of_two(lines), most), power_of_two(self.group), 1)
        block_n, programs = 32 if exact else 64, 2
        if k.code and v.code and block_m * many <= 16 and not exact:
            block_n, programs = coded_tile(k, v, False)
        if tiles.small(self.q.device) and max(k.width, v.width) > 128:
            block_n = 32
        while k.block % block_n and k.block > 1:
            block_n //= 2
        at_once = block_m // self.group  # rows per tile
        length = [-(-run.segment.slots // block_n) for run in runs]
        work = self.heads * sum(
            tiles_ * -(-len(run.rows) // at_once) for tiles_, run in zip(length, runs, strict=True)
        )
        wanted = _ITEMS * programs * tiles.processors(self.q.device)
        each = max(_FEWEST_TILES, -(-work // wanted)) * block_n
        items: list[list[int]] = []
        rows: list[int] = []
        for run in runs:
            of_run = self._places(run, runs[0])
            for first in range(0, len(run.rows), at_once):
                some = run.rows[first : first + at_once]
                for start in range(0, run.segment.slots, each):
                    part = max(self.parts[row] for row in some)
                    for row in some:
                        self.parts[row] = part + 1
                    stop = min(start + each, run.segment.slots)
                    items.append([*of_run, start, stop, part, len(rows), len(some), 0])
                rows += some
        return items, rows, {"BLOCK_M": block_m, "BLOCK_N": block_n}

    @staticmethod
    def _places(run: _Run, base: _Run) -> list[int]:
        """Offsets of a run's planes from the first run's, in elements, and the strides of heads."""
        offsets = []
        for own, other in ((run.k, base.k), (run.v, base.v)):
            for x, y in (
                (own.plane, other.plane),
                (own.scale, other.scale),
                (own.zero, other.zero),
            ):
                offsets.append((x.data_ptr() - y.data_ptr()) // x.element_size())
        strides = [x.stride(1) for c in (run.k, run.v) for x in (c.plane, c.scale)]
        return offsets + strides

    def _kind(self, k: Coded, v: Coded) -> torch.dtype:
        plain = {x.plane.dtype for x in (k, v) if not x.code}
        return self.q.dtype if plain <= {self.q.dtype} else torch.float32

    def _attend(
        self,
        runs: Sequence[_Run],
        items: list[list[int]],
        rows: list[int],
        tile: dict[str, Any],
        out: Tensor,
        lse: Tensor,
    ) -> None:
        from kvkeep.kernels import attend

        segment, k, v, _ = runs[0]
        q = segment.key_codec.rotate(self.q)
        q = q if q.stride(3) == 1 else q.contiguous()
        # One copy to the device for items and rows.
        packed = torch.tensor([x for item in items for x in item] + rows).to(q.device)
        table, named = packed[: len(items) * attend.COLUMNS], packed[len(items) * attend.COLUMNS :]
        aligned = all(x % 16 == 0 for item in items for x in item[:10])
        exact = self._kind(k, v) == torch.float32  # multiplied without tensor cores
        limits = (2**31 - 1, 0, 0, 0) * 3
        attend.attend[(1, len(items), self.heads)](
            q, k.plane, k.scale, k.zero, v.plane, v.scale, v.zero,
            q, q, None, None, None, None, None, table, named, out, lse, q, q,
            q.stride(2), q.stride(1), 0,
            *k.strides(True), *v.strides(True), 0, 0, 0, 0, 0,
            self.rows, 1, 0, 0, 0, 1, 0, _MOST_SLOTS, 1, 0, 0, 0, 0, 0,
            float(self.options.scale), float(self.options.softcap or 1.0), *limits,
            HEADS=self.heads, GROUP=self.group, SHARED=True, DENSE=True, REACHES=0,
            SOFTCAP=self.options.softcap is not None, MASS=False,
            TYPE=kernel_type(self._kind(k, v)), K_BLOCK=k.block, ALIGNED=aligned,
            **tile, **k.shape("K"), **v.shape("V"),
            num_warps=8 if exact else warps(k, v, tile["BLOCK_M"]),
            num_stages=tiles.stages(tile["BLOCK_N"], k.plane, v.plane),
        )  # fmt: skip
