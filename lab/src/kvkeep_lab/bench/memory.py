"""The resident memory of a cache after a long generation and during it."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

from kvkeep.hf.attach import attach
from kvkeep.hf.models import load
from kvkeep.host.placement import dtype_named
from kvkeep.host.progress import Progress, Work, silent
from kvkeep.spec import parse_specs
from kvkeep_lab.bench.decode_loop import allocated_bytes, buffers, decode, live_bytes, new_cache
from kvkeep_lab.bench.options import DYNAMIC, Memory
from kvkeep_lab.bench.record import result
from kvkeep_lab.bench.resident import (
    in_core,
    peak,
    require_counters,
    reset_peak,
    resident,
    together,
)
from kvkeep_lab.bench.text import tokens_of_text


def run(asked: Memory, progress: Progress = silent) -> dict[str, Any]:
    """Generate until all tokens were fed, with each cache in a process of its own, and the prompt
    fed both at once and in chunks.

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
    require_counters()
    dtype_named(asked.dtype)
    for spec in asked.specs:
        if spec != DYNAMIC:
            parse_specs(spec)
    rows, work = [], Work(progress, 2 * len(asked.specs))
    for spec in asked.specs:
        for size in (asked.prompt, asked.chunk):
            chunked = ", chunked" if size < asked.prompt else ""
            work.stage(f"{spec}, {asked.tokens} tokens{chunked}")
            rows += together([partial(_measure, spec, asked, size)])
    return result("memory", rows, **asked.some("model", "dtype", "prompt", "chunk"))


def _measure(spec: str, asked: Memory, size: int) -> dict[str, Any]:
    model, tokenizer = load(asked.model, asked.dtype)
    with nullcontext() if spec == DYNAMIC else attach(model, spec):
        ids = tokens_of_text(tokenizer, asked.prompt)
        decode(model, ids, new_cache(spec, model), 2, chunk=size)  # warm-up, not counted
        row = _held_by(spec, model, ids, asked.tokens, size)
    return {"spec": spec, "chunked": size < asked.prompt, **row}


def _held_by(spec: str, model: Any, ids: Any, tokens: int, size: int) -> dict[str, Any]:
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
    found = {"tokens": tokens, "live_bytes": live, "allocated_bytes": allocated}
    ratio = {"resident_bytes": held_bytes, "ratio": held_bytes / live}
    return found | ratio | {"peak_above_bytes": max(above)}
