"""What one more token costs: concatenation against writing in place."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

from kvkeep.bench.environment import environment
from kvkeep.evals.timing import interleaved, median_ratio
from kvkeep.layer import LayerCache
from kvkeep.spec import CacheSpec

HEADS, DIM = 8, 128
SYSTEMS = {"concat": "keep_all@concat", "growing": "keep_all@growing"}


def run(
    tokens: Sequence[int] = (256, 1024, 2048, 4096),
    *,
    turns: int = 10,
    progress: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Time one decode token on a layer that holds `tokens` tokens: f32, B 1, H 8, D 128.

    Returns:
        `rows`, one per entry of `tokens`: medians in microseconds of the update alone and of the
        whole step (update, attention, settle), and `update_ratio` and `step_ratio`, the medians
        of concat / growing pair by pair.
    """
    rows = []
    with torch.inference_mode():
        for held in tokens:
            if progress is not None:
                progress(f"{held} tokens")
            update = interleaved({n: _update(s, held) for n, s in SYSTEMS.items()}, turns=turns)
            step = interleaved({n: _step(s, held) for n, s in SYSTEMS.items()}, turns=turns)
            row: dict[str, Any] = {"tokens": held}
            for what, seconds in (("update", update), ("step", step)):
                for name in SYSTEMS:
                    row[f"{name}_{what}_us"] = statistics.median(seconds[name]) * 1e6
                row[f"{what}_ratio"] = median_ratio(seconds["concat"], seconds["growing"])
            rows.append(row)
    return {
        "benchmark": "append",
        "shape": {"dtype": "float32", "B": 1, "H": HEADS, "D": DIM},
        "environment": environment(),
        "turns": turns,
        "rows": rows,
    }


def _filled(spec: str, held: int) -> LayerCache:
    layer = CacheSpec.parse(spec).layer()
    layer.extend(torch.randn(1, HEADS, held, DIM), torch.randn(1, HEADS, held, DIM))
    layer.settle()
    return layer


def _token() -> torch.Tensor:
    return torch.randn(1, HEADS, 1, DIM)


def _update(spec: str, held: int) -> Callable[[], object]:
    layer, k, v = _filled(spec, held), _token(), _token()

    def update() -> None:
        layer.extend(k, v)
        layer.settle()

    return update


def _step(spec: str, held: int) -> Callable[[], object]:
    layer, q, k, v = _filled(spec, held), _token(), _token(), _token()
    return lambda: layer.step(q, k, v, scale=DIM**-0.5)
