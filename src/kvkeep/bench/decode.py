"""What a decode step costs as the context grows: the slope is the cache's own cost."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from kvkeep.bench import llama_cpp
from kvkeep.bench.environment import environment, read_bandwidth
from kvkeep.errors import SpecError
from kvkeep.evals.text import tokens_of_text
from kvkeep.evals.timing import interleaved, spread
from kvkeep.hf.attach import attach
from kvkeep.hf.decode import DYNAMIC, STATIC, bytes_per_token, filled_from, new_cache
from kvkeep.hf.models import load
from kvkeep.spec import CacheSpec

KVKEEP, SPEC = "kvkeep", "keep_all"
OTHERS = (DYNAMIC, STATIC, llama_cpp.LLAMA_CPP)


def run(
    model: str = "smollm2-135m",
    *,
    dtype: str = "bfloat16",
    contexts: Sequence[int] = (128, 2048, 7936),
    specs: Sequence[str] = (SPEC,),
    against: Sequence[str] = (DYNAMIC,),
    turns: int = 10,
    burst: int = 4,
    progress: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Time single-token steps of a model over contexts of real text, one row.

    All systems have the same weights and hold the same tokens, and take turns.

    Args:
        model: a name that `kvkeep models` knows, a directory, or a hub name.
        dtype: of weights and cache.
        contexts: tokens held when the steps begin; at least two, for a slope.
        specs: what kvkeep caches keep; each is a system, called "kvkeep" for keep_all, else by both
            names.
        against: "hf-dynamic", "hf-static" (compiled, which takes minutes), and "llama.cpp" (needs
            llama-cpp-python).
        turns, burst: each system makes `turns` + 1 times `burst` steps, the first not counted.

    Returns:
        `rows` (`system`, `context`, `median_ms`, `spread_ms`), `slope_us_per_token` of each system
        by least squares, and `bandwidth_floor_us_per_token`: one token's bytes over the read
        bandwidth measured in this run.

    Raises:
        SpecError: a system that does not exist.
        UnsupportedError: llama.cpp is not here, or cannot run this model.
    """
    for spec in specs:
        CacheSpec.parse(spec)
    for system in against:
        if system not in OTHERS:
            raise SpecError(
                f"no system {system!r} to measure against; there is {', '.join(OTHERS)}"
            )
    loaded, tokenizer = load(model, dtype)
    if llama_cpp.LLAMA_CPP in against:
        llama_cpp.require(loaded)
    rows, read = [], [read_bandwidth()]
    steps: dict[tuple[str, int], Callable[[], object]] = {}
    with TemporaryDirectory() as directory:
        systems = _Systems(loaded, specs, against, Path(directory))
        for context in contexts:
            _say(progress, f"{context} tokens")
            ids = tokens_of_text(tokenizer, context + 1)
            for system, step in systems.steps(ids, context + (turns + 1) * burst).items():
                steps[system, context] = step
        _say(progress, "steps")
        # Contexts take turns too, or drift between them would be taken for a slope.
        for (system, context), seconds in interleaved(steps, turns=turns, burst=burst).items():
            rows.append(
                {
                    "system": system,
                    "context": context,
                    "median_ms": statistics.median(seconds) * 1e3,
                    "spread_ms": spread(seconds) * 1e3,
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
        "slope_us_per_token": {
            system: _slope(rows, system) for system in (*map(_named, specs), *against)
        },
        "bandwidth_floor_us_per_token": bytes_per_token(loaded) / bandwidth / 1e3,
        "read_gb_per_s": bandwidth,
    }


class _Systems:
    """The models to measure, all on the same weights; llama.cpp's file goes into `directory`."""

    def __init__(
        self, model: Any, specs: Sequence[str], against: Sequence[str], directory: Path
    ) -> None:
        shared = {id(weight): weight for weight in model.parameters()}
        plain, static = (copy.deepcopy(model, shared) for _ in range(2))
        attach(model)
        self.kvkeep = model
        self.specs = specs
        self.against = against
        self.directory = directory
        self.transformers: dict[str, Callable[..., Any]] = {
            DYNAMIC: plain,
            STATIC: torch.compile(static.forward, fullgraph=True, dynamic=False),
        }

    def steps(self, ids: Tensor, room: int) -> dict[str, Callable[[], object]]:
        """Feed all of ids (1, n) but the last, and return what feeds the last in each system."""
        steps: dict[str, Callable[[], object]] = {}
        full: Any = None
        for spec in self.specs:
            cache = self._filled(spec, ids)
            full = cache if spec == SPEC else full
            steps[_named(spec)] = _step(self.kvkeep, ids[:, -1:], cache)
        full = self._filled(SPEC, ids) if full is None and self.against else full
        for system in self.against:
            if system == llama_cpp.LLAMA_CPP:
                steps[system] = llama_cpp.stepper(self.kvkeep, ids, room, self.directory)
            else:
                cache = filled_from(full, new_cache(system, self.kvkeep, room))
                steps[system] = _step(self.transformers[system], ids[:, -1:], cache)
        return steps

    def _filled(self, spec: str, ids: Tensor) -> Any:
        cache = new_cache(spec, self.kvkeep)
        with torch.inference_mode():
            self.kvkeep(ids[:, :-1], past_key_values=cache, logits_to_keep=1)
        return cache


def _named(spec: str) -> str:
    return KVKEEP if spec == SPEC else f"{KVKEEP} {spec}"


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
