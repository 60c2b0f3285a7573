"""`kvkeep doctor --measure`: times the native library and torch, and stores which is faster."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, cycle, product
from math import inf, isqrt, prod
from time import perf_counter

import torch
from torch import Tensor

from kvkeep import choice, native_library
from kvkeep.attention import Options, Segment, View, dispatch
from kvkeep.choice import Box, Table
from kvkeep.codec import Plain
from kvkeep.files.atomic import whole_file, write_all
from kvkeep.linears import Stored, Weights
from kvkeep.planes import POSITION

Grid = tuple[tuple[int, ...], ...]
"""The sizes that are measured, in the order of `choice.SIZES`. Sizes between two of them count as
the larger, and sizes above the largest as the largest."""

_ATTENTION: Grid = ((1, 4, 16, 64, 256, 1024), (256, 2048, 8192, 32768), (1, 4, 16), (64, 128, 256))
_ROWS = (1, 2, 4, 8, 16, 32, 64, 256)
_ELEMENTS = (1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22)  # of weights
_KV_HEADS = 4
_MOST_WORK = 1 << 27  # multiplications of a call; larger calls count as the largest within it
_COLD = 64 << 20  # bytes of weights that are read in turn, so that they come from memory
_BURST, _TURNS = 2, 5  # calls per turn, and most turns
_SECONDS = 0.02  # time after which no turn starts
_CLEAR, _LOSS = 1.5, 1.05  # ratios of times that end a measurement, and for which torch is faster

Call = Callable[[], object]


def measure(progress: Callable[[str, float | None], None]) -> None:
    """Measure this machine with the instruction set in use, in less than a minute, and store the
    table for later processes; this process uses it from now on."""
    dtypes = (torch.float32, torch.bfloat16)
    table: Table = {"attention": {}, "linears": {}}
    with torch.inference_mode():
        for index, dtype in enumerate(dtypes):
            name = choice.name_of(dtype)
            progress(f"attention in {name}", index / len(dtypes))
            table["attention"][name] = boxes(_attention(dtype), _ATTENTION)
            progress(f"linear layers in {name}", (index + 0.7) / len(dtypes))
            grid = (_ROWS, tuple(dtype.itemsize * count for count in _ELEMENTS))
            table["linears"][name] = boxes(_linears(dtype, grid), grid)
    path = choice.measured_file()
    try:
        tables = choice.measured_tables(path)
    except ValueError:
        tables = {}
    tables[choice.machine(native_library.instructions())] = table
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path, sync=False) as file:
        write_all(file.fileno(), json.dumps(tables).encode())
    choice.forget()


def boxes(slow: set[tuple[int, ...]], grid: Grid) -> list[Box]:
    """The sizes that count as one of the sizes `slow` of a grid, in few boxes."""
    found = {
        tuple((axis.index(x),) * 2 for x, axis in zip(size, grid, strict=True)) for size in slow
    }
    for at in range(len(grid)):
        merged: dict[tuple[object, ...], list[tuple[tuple[int, int], ...]]] = {}
        for box in sorted(found):
            same = merged.setdefault((box[:at], box[at + 1 :]), [])
            if same and same[-1][at][1] + 1 == box[at][0]:
                joined = (same[-1][at][0], box[at][1])
                same[-1] = (*box[:at], joined, *box[at + 1 :])
            else:
                same.append(box)
        found = set(chain.from_iterable(merged.values()))
    return [
        tuple(
            (axis[low - 1] + 1 if low else 0, axis[high] if high + 1 < len(axis) else None)
            for (low, high), axis in zip(box, grid, strict=True)
        )
        for box in sorted(found)
    ]


def _attention(dtype: torch.dtype) -> set[tuple[int, ...]]:
    """The sizes for which torch's attention is faster."""
    slow: set[tuple[int, ...]] = set()
    tokens, slots, groups, widths = _ATTENTION
    for group, width, n, length in product(groups, widths, tokens, slots):
        size = (n, length, group, width)
        if n > length:
            continue
        if _KV_HEADS * prod(size) <= _MOST_WORK:
            if _torch_is_faster(*_attention_calls(*size, dtype)):
                slow.add(size)
        else:
            shorter = slots[max(0, slots.index(length) - 1)]
            near = (n, shorter) if n <= shorter < length else (tokens[tokens.index(n) - 1], length)
            if (*near, group, width) in slow:
                slow.add(size)
    return slow


def _attention_calls(
    n: int, length: int, group: int, width: int, dtype: torch.dtype
) -> tuple[Call, Call]:
    q = torch.randn(1, _KV_HEADS * group, n, width).to(dtype)
    k, v = (torch.randn(1, _KV_HEADS, length, width).to(dtype) for _ in range(2))
    position = torch.arange(length, dtype=torch.int32)
    segment = Segment({"k": k, "v": v, POSITION: position.view(1, 1, -1)}, Plain(), Plain())
    call = q, View((segment,), position[-n:], ragged=False), Options(width**-0.5)
    return (lambda: dispatch(*call, "native")), (lambda: dispatch(*call, "sdpa"))


def _linears(dtype: torch.dtype, sizes: Grid) -> set[tuple[int, ...]]:
    """The sizes for which torch's linear layers are faster."""
    slow: set[tuple[int, ...]] = set()
    memory = torch.randn(_COLD // dtype.itemsize).to(dtype)
    for size in sizes[1]:
        width = isqrt(size // dtype.itemsize)
        weights = memory.view(-1, width, width).unbind()
        prepared = cycle([Weights([Stored(weight)], [None], dtype) for weight in weights])
        plain = cycle(weights)
        for rows in sizes[0]:
            x = torch.randn(rows, width).to(dtype)
            native, theirs = partial(_multiplied, prepared, x), partial(_multiplied, plain, x)
            if _torch_is_faster(native, theirs):
                slow.add((rows, size))
    return slow


def _multiplied(weights: Iterator[Weights | Tensor], x: Tensor) -> None:
    one = next(weights)
    if isinstance(one, Weights):
        one.product(x)
    else:
        torch.nn.functional.linear(x, one)


def _torch_is_faster(native: Call, theirs: Call) -> bool:
    """Whether the second call is clearly faster than the first."""
    native(), theirs()
    best, start = [inf, inf], perf_counter()
    for _ in range(_TURNS):
        for index, call in enumerate((native, theirs)):
            before = perf_counter()
            for _ in range(_BURST):
                call()
            best[index] = min(best[index], perf_counter() - before)
        if max(best) > _CLEAR * min(best) or perf_counter() - start > _SECONDS:
            break
    return best[1] * _LOSS < best[0]
