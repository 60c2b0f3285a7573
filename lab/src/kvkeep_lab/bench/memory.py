"""The resident memory of a cache after a long generation and during it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvkeep.host.progress import Progress, Work, silent
from kvkeep.spec import parse_specs
from kvkeep_lab.bench.record import result
from kvkeep_lab.bench.resident import alone, in_core, peak, require_counters, reset_peak, resident

DYNAMIC = "hf-dynamic"
SPECS = (
    "keep_all",
    "h2o:512",
    "h2o:512+int4",
    "adakv(h2o:512)",
    "window:512",
    DYNAMIC,
)


def run(
    model: str = "smollm2-135m",
    *,
    dtype: str = "float32",
    tokens: int = 2100,
    prompt: int = 1000,
    chunk: int = 500,
    specs: Sequence[str] = SPECS,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Generate until `tokens` tokens were fed, with each cache in a process of its own, and the
    prompt fed both at once and in chunks.

    Args:
        model: a name from `kvkeep models`, a directory, or a hub name.
        dtype: dtype of weights and cache.
        tokens: total tokens fed.
        prompt: tokens of the prompt among them.
        chunk: tokens of each chunk of the prompt in the chunked runs.
        specs: kvkeep specs, or "hf-dynamic".

    Returns:
        `rows`: for each spec and way of feeding (`chunked`), `live_bytes`, the size of the live
        slots; `allocated_bytes`, their allocated memory; `resident_bytes`, the buffers' pages
        in memory, or the memory that the process released when the cache was dropped, if that is
        more; `ratio`, of resident to live bytes; and `peak_above_bytes`, the most by which the
        process's memory during any decode step exceeded the model and the live slots.

    Raises:
        SpecError: a spec does not exist.
        UnsupportedError: the system is not Linux, whose counters this reads.
    """
    from kvkeep.host.placement import dtype_named

    require_counters()
    dtype_named(dtype)
    for spec in specs:
        if spec != DYNAMIC:
            parse_specs(spec)
    rows, work = [], Work(progress, 2 * len(specs))
    for spec in specs:
        for size in (prompt, chunk):
            work.stage(f"{spec}, {tokens} tokens" + (", chunked" if size < prompt else ""))
            rows.append(alone(_measure, spec, model, dtype, tokens, prompt, size))
    return result("memory", rows, model=model, dtype=dtype, prompt=prompt, chunk=chunk)


def _measure(
    spec: str, name: str, dtype: str, tokens: int, prompt: int, size: int
) -> dict[str, Any]:
    from kvkeep.hf.models import load
    from kvkeep_lab.bench.decode_loop import decode, new_cache, prepared
    from kvkeep_lab.bench.text import tokens_of_text

    model, tokenizer = load(name, dtype)
    with prepared(spec, model):
        ids = tokens_of_text(tokenizer, prompt)
        decode(model, ids, new_cache(spec, model), 2, chunk=size)  # warm-up, not counted
        row = _held_by(spec, model, ids, tokens, size)
    return {"spec": spec, "chunked": size < prompt, **row}


def _held_by(spec: str, model: Any, ids: Any, tokens: int, size: int) -> dict[str, Any]:
    from kvkeep_lab.bench.decode_loop import allocated_bytes, buffers, decode, live_bytes, new_cache

    held = [new_cache(spec, model)]  # the only reference, so that it can be dropped
    without: list[int] = []  # resident bytes except the live slots, after the prefill
    above: list[int] = []

    def after_step() -> None:
        if not without:  # the prefill's activations are not counted
            without.append(resident() - live_bytes(held[0]))
        else:
            above.append(peak() - without[0] - live_bytes(held[0]))
        reset_peak()

    decode(model, ids, held[0], tokens - ids.shape[1], after_step, chunk=size)
    live, allocated = live_bytes(held[0]), allocated_bytes(held[0])
    freed, pages = resident(), in_core(buffers(held[0]))
    held.clear()
    freed -= resident()
    held_bytes = max(freed, pages)
    return {
        "tokens": tokens,
        "live_bytes": live,
        "allocated_bytes": allocated,
        "resident_bytes": held_bytes,
        "ratio": held_bytes / live,
        "peak_above_bytes": max(above),
    }
