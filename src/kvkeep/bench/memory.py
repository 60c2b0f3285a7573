"""What a cache really holds: resident memory after a long generation, and while it grew."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kvkeep.bench.environment import environment
from kvkeep.bench.resident import alone, peak, require_counters, reset_peak, resident

SYSTEMS = ("keep_all@growing", "hf-dynamic")


def run(
    model: str = "smollm2-135m",
    *,
    tokens: int = 4100,
    prompt: int = 1024,
    systems: Sequence[str] = SYSTEMS,
    progress: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Generate until `tokens` tokens are cached, each system in a process of its own.

    Args:
        model: a name that `kvkeep models` knows, a directory, or a hub name; run in float32.
        tokens: tokens held at the end.
        prompt: how many of them are fed at once.
        systems: "hf-dynamic" or kvkeep specs.

    Returns:
        `rows`: per system `live_bytes`, the tensors' own size; `resident_bytes`, the memory that
        came back when the cache was dropped; their `ratio`; and `peak_above_bytes`, the most by
        which resident memory during any decode step stood above the model and the live slots.

    Raises:
        UnsupportedError: not on Linux, whose counters this reads.
    """
    require_counters()
    rows = []
    for system in systems:
        if progress is not None:
            progress(f"{system}, {tokens} tokens")
        rows.append(alone(_measure, system, model, tokens, prompt))
    return {
        "benchmark": "memory",
        "environment": environment(),
        "model": model,
        "dtype": "float32",
        "rows": rows,
    }


def _measure(system: str, name: str, tokens: int, prompt: int) -> dict[str, Any]:
    from kvkeep.evals.text import tokens_of_text
    from kvkeep.hf.decode import decode, new_cache, prepared
    from kvkeep.hf.models import load

    model, tokenizer = load(name)
    with prepared(system, model):
        ids = tokens_of_text(tokenizer, prompt)
        decode(model, ids, new_cache(system, model), 2)  # so that lazy set-up is not counted
        return _held_by(system, model, ids, tokens)


def _held_by(system: str, model: Any, ids: Any, tokens: int) -> dict[str, Any]:
    from kvkeep.hf.decode import decode, live_bytes, new_cache

    held = [new_cache(system, model)]  # the only reference, so that it can be dropped
    without: list[int] = []  # resident bytes apart from the live slots, after the prefill
    above: list[int] = []

    def after_step() -> None:
        if not without:  # the prefill's activations are not the cache's
            without.append(resident() - live_bytes(held[0]))
        else:
            above.append(peak() - without[0] - live_bytes(held[0]))
        reset_peak()

    decode(model, ids, held[0], tokens - ids.shape[1], after_step)
    live = live_bytes(held[0])
    freed = resident()
    held.clear()
    freed -= resident()
    return {
        "system": system,
        "tokens": tokens,
        "live_bytes": live,
        "resident_bytes": freed,
        "ratio": freed / live,
        "peak_above_bytes": max(above),
    }
