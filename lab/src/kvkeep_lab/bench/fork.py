"""Many continuations of one prompt: their memory, and the time of a step of all of them."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from kvkeep.hf.attach import attach
from kvkeep.hf.cache import Cache
from kvkeep.hf.cache_argument import as_cache
from kvkeep.hf.models import load
from kvkeep.host.progress import Progress, Work, silent
from kvkeep_lab.bench.options import Fork
from kvkeep_lab.bench.record import result
from kvkeep_lab.bench.text import tokens_of_text
from kvkeep_lab.bench.timing import medians_of


def run(asked: Fork, progress: Progress = silent) -> dict[str, Any]:
    """Fork the cache of a prompt of real text.

    Returns:
        `forks`: their number, the `bytes` that they and the prompt hold, and the `ratio` of that to
        one cache and the new tokens. `rows`: for each batch, which shares the prompt or has a copy
        for each continuation, the `bytes` held, `step_ms`, and `attention_ms`, the time of all
        layers' cache steps alone.
    """
    tokens, forks, new, rows = asked.tokens, asked.forks, asked.new, asked.rows
    loaded, tokenizer = load(asked.model, asked.dtype, progress=progress)
    attach(loaded)
    ids = tokens_of_text(tokenizer, tokens + new)
    cache = Cache(loaded)
    work = Work(progress, tokens + forks * new + 4 * asked.turns * rows)
    with torch.inference_mode():
        work.stage(f"{tokens} tokens", tokens)
        loaded(ids[:, :tokens], **as_cache(loaded, cache), logits_to_keep=1)
        one = cache.live_bytes
        copied = Cache(loaded)
        copied.restore(cache.snapshot())
        frozen = cache.freeze()
        work.stage(f"{forks} forks", forks * new)
        several = [frozen.fork() for _ in range(forks)]
        for fork in several:
            loaded(ids[:, tokens:], **as_cache(loaded, fork), logits_to_keep=1)
            work.tick(new)
        held = one + sum(fork.nbytes - fork.shared_bytes for fork in several)
        del several
        work.stage(f"a batch of {rows}", 4 * asked.turns * rows)
        copied.repeat(rows)
        batches = {"shared": frozen.fork(rows), "separate": copied}
        found = _timed(loaded, batches, ids[:, :1].expand(rows, 1), asked.turns)
    ratio = held / (one + forks * new * one // tokens)
    shared = asked.some("forks", "tokens", "new") | {"bytes": held, "ratio": ratio}
    told = [
        {"system": f"{rows} rows, {name}", "tokens": tokens, "bytes": batch.live_bytes}
        | found[name]
        for name, batch in batches.items()
    ]
    return result("fork", told, **asked.some("model", "dtype"), forks=shared)


def _timed(
    model: Any, batches: dict[str, Cache], token: torch.Tensor, turns: int
) -> dict[str, dict[str, float]]:
    """Times of a step of each batch; the step is cropped again."""

    def step(cache: Cache) -> None:
        model(token, **as_cache(model, cache))
        cache.crop(-1)

    def attention(cache: Cache) -> None:
        for layer in cache.layers:
            layer.step(q, k, k, scale=1.0)
            layer.crop(-1)

    for cache in batches.values():
        model(token, **as_cache(model, cache))  # so that each fork has a tail of its own
    like = batches["separate"].layers[0].state().parts["slots"]["k"]
    k = torch.randn_like(like[:, :, :1])
    q = torch.randn(*token.shape[:1], model.config.num_attention_heads, 1, like.shape[3]).to(k)
    found: dict[str, dict[str, float]] = {name: {} for name in batches}
    for what, call in (("step_ms", step), ("attention_ms", attention)):
        calls = {name: partial(call, cache) for name, cache in batches.items()}
        for name, seconds in medians_of(calls, turns=turns, burst=2).items():
            found[name][what] = 1e3 * seconds
    return found
