"""What a decode step costs as the context grows: the slope is the cache's own cost."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kvkeep.bench.environment import environment, read_bandwidth
from kvkeep.bench.text import tokens_of_text
from kvkeep.bench.timing import interleaved
from kvkeep.errors import SpecError
from kvkeep.hf.attach import attach
from kvkeep.hf.decode import DYNAMIC, STATIC, bytes_per_token, filled_from, new_cache
from kvkeep.hf.models import load

SPEC = "keep_all"


def run(
    model: str = "smollm2-135m",
    *,
    dtype: str = "bfloat16",
    contexts: Sequence[int] = (128, 2048, 7936),
    against: Sequence[str] = (DYNAMIC,),
    turns: int = 5,
    burst: int = 4,
    progress: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Time single-token steps of a model over contexts of real text, one row.

    All systems hold the same keys and values, computed once, and take turns.

    Args:
        model: a name that `kvkeep models` knows, a directory, or a hub name.
        dtype: of weights and cache.
        contexts: tokens held when the steps begin; at least two, for a slope.
        against: "hf-dynamic", and "hf-static" (compiled, which takes minutes).
        turns, burst: each system makes `turns` + 1 times `burst` steps, the first not counted.

    Returns:
        `rows` (`system`, `context`, `median_ms`, `spread_ms`), `slope_us_per_token` of each system
        by least squares, and `bandwidth_floor_us_per_token`: one token's bytes over the read
        bandwidth measured in this run.
    """
    for system in against:
        if system not in (DYNAMIC, STATIC):
            raise SpecError(
                f"no system {system!r} to measure against; there is {DYNAMIC}, {STATIC}"
            )
    loaded, tokenizer = load(model, dtype)
    shared = {id(weight): weight for weight in loaded.parameters()}
    plain = copy.deepcopy(loaded, shared)  # the same weights, not attached
    static = torch.compile(copy.deepcopy(loaded, shared).forward, fullgraph=True)
    attach(loaded)
    models: dict[str, Callable[..., Any]] = {DYNAMIC: plain, STATIC: static}
    systems = [SPEC, *against]
    rows, read = [], [read_bandwidth()]
    for context in contexts:
        _say(progress, f"{context} tokens: prefill")
        ids = tokens_of_text(tokenizer, context + 1)
        full = new_cache(SPEC, loaded)
        with torch.inference_mode():
            loaded(ids[:, :-1], past_key_values=full, logits_to_keep=1)
        room = context + (turns + 1) * burst
        steps = {}
        for system in systems:
            cache = full if system == SPEC else filled_from(full, new_cache(system, loaded, room))
            steps[system] = _step(models.get(system, loaded), ids[:, -1:], cache)
        _say(progress, f"{context} tokens: steps")
        for system, seconds in interleaved(steps, turns=turns, burst=burst).items():
            quarters = statistics.quantiles(seconds, n=4)
            rows.append(
                {
                    "system": system,
                    "context": context,
                    "median_ms": statistics.median(seconds) * 1e3,
                    "spread_ms": (quarters[2] - quarters[0]) * 1e3,
                }
            )
        read.append(read_bandwidth())
    bandwidth = statistics.median(read)
    return {
        "benchmark": "decode",
        "model": model,
        "dtype": dtype,
        "environment": environment(),
        "rows": rows,
        "slope_us_per_token": {system: _slope(rows, system) for system in systems},
        "bandwidth_floor_us_per_token": bytes_per_token(loaded) / bandwidth / 1e3,
        "read_gb_per_s": bandwidth,
    }


def _step(model: Callable[..., Any], token: Tensor, cache: Any) -> Callable[[], object]:
    def step() -> None:
        with torch.inference_mode():
            model(token, past_key_values=cache, logits_to_keep=1)

    return step


def _slope(rows: Sequence[dict[str, Any]], system: str) -> float | None:
    """Microseconds per token held, by least squares; None for a single context."""
    mine = [row for row in rows if row["system"] == system]
    if len(mine) < 2:
        return None
    x, y = [row["context"] for row in mine], [row["median_ms"] * 1e3 for row in mine]
    return statistics.linear_regression(x, y).slope


def _say(progress: Callable[[str], None] | None, doing: str) -> None:
    if progress is not None:
        progress(doing)
