"""The prefill of a prompt, compared with transformers and scaled_dot_product_attention."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Sequence
from typing import Any

import torch

from kvkeep.hf.attach import attach
from kvkeep.hf.cache_argument import as_cache
from kvkeep.hf.models import load
from kvkeep.host.progress import Progress, Work, silent
from kvkeep_lab.bench.decode_loop import DYNAMIC, new_cache
from kvkeep_lab.bench.record import result
from kvkeep_lab.bench.text import tokens_of_text
from kvkeep_lab.bench.timing import interleaved

KVKEEP = "kvkeep"


def run(
    model: str = "smollm2-135m",
    *,
    dtype: str = "float32",
    lengths: Sequence[int] = (2000, 7900),
    turns: int = 3,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Time the forward of prompts of real text with an empty cache and one row.

    Returns:
        `rows`: for each length and system `median_s`, and `ratio`, transformers' median divided by
        this one.
    """
    loaded, tokenizer = load(model, dtype, progress=progress)
    shared = {id(weight): weight for weight in loaded.parameters()}
    models = {KVKEEP: loaded, DYNAMIC: copy.deepcopy(loaded, shared)}
    attach(loaded)
    rows, work = [], Work(progress, sum(lengths))
    for length in lengths:
        work.stage(f"{length} tokens", length)
        ids = tokens_of_text(tokenizer, length)

        def prefill(system: str, ids: torch.Tensor = ids) -> None:
            cache = new_cache("keep_all" if system == KVKEEP else system, loaded)
            with torch.inference_mode():
                models[system](ids, **as_cache(models[system], cache), logits_to_keep=1)

        calls = {system: (lambda s=system: prefill(s)) for system in models}
        seconds = interleaved(calls, turns=turns, burst=1, tick=work.part)
        medians = {system: statistics.median(times) for system, times in seconds.items()}
        rows += [
            {
                "system": system,
                "length": length,
                "median_s": median,
                "ratio": medians[DYNAMIC] / median,
            }
            for system, median in medians.items()
        ]
    return result("prefill", rows, model=model, dtype=dtype)
