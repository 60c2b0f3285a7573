"""Linear layers: kvkeep's kernel and torch's, over weights that no cache holds."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kvkeep.errors import SpecError
from kvkeep.host.placement import dtype_named
from kvkeep.host.progress import Progress, Work, silent
from kvkeep.linears import require_kernel, route
from kvkeep.native_library import TYPES
from kvkeep_lab.bench.device import bandwidth
from kvkeep_lab.bench.options import Linear
from kvkeep_lab.bench.record import result
from kvkeep_lab.bench.timing import Call, interleaved, spread

_SHAPES = (
    *((576, 192), (576, 576), (576, 1536), (1536, 576), (576, 49152)),  # SmolLM2-135M
    *((2048, 512), (2048, 2048), (2048, 8192), (8192, 2048)),  # Llama 3.2 1B
)
_ROWS = (1, 2, 4, 8, 16, 32)
_COLD = 128 << 20  # bytes of weights that are read in turn; more than a cache


def run(asked: Linear, progress: Progress = silent) -> dict[str, Any]:
    """Time x W^T on the CPU, by the layers of an attached model and by torch's.

    An attached model's layers use torch where it is faster for this number of rows.

    Copies of the weights are read in turn, so that they come from memory as in a model.

    Returns:
        `rows`: for each shape, number of rows and system `median_us` and `spread_us` of one call,
        `gb_per_s` (bytes of the weights divided by the time), `of_read` (that, divided by the
        bandwidth), `of_torch` (torch's time divided by this one's), `of_one` (this time divided by
        that of one row, if measured); and `read_gb_per_s`, this machine's memory bandwidth, the
        median of measurements before and after.

    Raises:
        SpecError: a shape is not two numbers, or the kernel lacks the dtype.
        UnsupportedError: there is no native library.
    """
    shapes = _SHAPES if asked.shapes is None else [_shape(text) for text in asked.shapes]
    rows, dtype = asked.rows or _ROWS, dtype_named(asked.dtype)
    require_kernel()
    if dtype not in TYPES:
        raise SpecError(
            f"no layers of {dtype} by the kernel; there is {', '.join(map(str, TYPES))}"
        )
    rates, found = [bandwidth(torch.device("cpu"))[1]], []
    work = Work(progress, sum(inputs * outputs for inputs, outputs in shapes))
    with torch.inference_mode():
        for inputs, outputs in shapes:
            work.stage(f"{inputs} x {outputs}", inputs * outputs)
            found += _measured(inputs, outputs, rows, dtype, asked.turns, work)
    rates.append(bandwidth(torch.device("cpu"))[1])
    rate = statistics.median(rates)
    for row in found:
        row["of_read"] = row["gb_per_s"] / rate
    return result("linear", found, dtype=str(dtype).removeprefix("torch."), read_gb_per_s=rate)


def _shape(text: str) -> tuple[int, int]:
    """The (inputs, outputs) of 576x1536."""
    inputs, _, outputs = text.partition("x")
    if not (inputs.isdigit() and outputs.isdigit()):
        raise SpecError(f"--shapes {text}: give layers such as 576x1536,1536x576")
    return int(inputs), int(outputs)


def _measured(
    inputs: int, outputs: int, rows: Sequence[int], dtype: torch.dtype, turns: int, work: Work
) -> list[dict[str, Any]]:
    size = inputs * outputs * dtype.itemsize
    copies = max(2, -(-_COLD // size))
    theirs = [nn.Linear(inputs, outputs, bias=False, dtype=dtype) for _ in range(copies)]
    ours = [copy.copy(layer) for layer in theirs]  # with the same weights
    route(nn.ModuleList(ours))
    calls: dict[tuple[int, str], Call] = {}
    for count in rows:
        x = torch.randn(count, inputs).to(dtype)
        calls |= {(count, "kvkeep"): _through(ours, x), (count, "torch"): _through(theirs, x)}
    timed = interleaved(calls, turns=turns, burst=2, tick=work.part)
    medians = {key: statistics.median(seconds) / copies for key, seconds in timed.items()}
    found = []
    for (count, name), seconds in medians.items():
        row = {"inputs": inputs, "outputs": outputs, "rows": count, "system": name}
        row |= {"median_us": seconds * 1e6, "spread_us": spread(timed[count, name]) / copies * 1e6}
        row |= {"gb_per_s": size / seconds / 1e9, "of_torch": medians[count, "torch"] / seconds}
        found.append(row | ({"of_one": seconds / medians[1, name]} if 1 in rows else {}))
    return found


def _through(layers: list[nn.Linear], x: Tensor) -> Call:
    def call() -> None:
        for layer in layers:
            layer(x)

    return call
