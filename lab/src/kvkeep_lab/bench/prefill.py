"""The prefill of a prompt, compared with transformers and scaled_dot_product_attention."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvkeep.hf.attach import attach
from kvkeep.hf.cache_argument import as_cache
from kvkeep.hf.models import load
from kvkeep.host.progress import Progress, Work, silent
from kvkeep_lab.bench.decode_loop import new_cache
from kvkeep_lab.bench.options import DYNAMIC, SPEC, Prefill
from kvkeep_lab.bench.record import result
from kvkeep_lab.bench.systems import KVKEEP, twin
from kvkeep_lab.bench.text import tokens_of_text
from kvkeep_lab.bench.timing import medians_of


def run(asked: Prefill, progress: Progress = silent) -> dict[str, Any]:
    """Time the forward of prompts of real text with an empty cache and one row.

    Returns:
        `rows`: for each length and system `median_s`, and `ratio`, transformers' median divided by
        this one.
    """
    loaded, tokenizer = load(asked.model, asked.dtype, progress=progress)
    models = {KVKEEP: loaded, DYNAMIC: twin(loaded)}
    attach(loaded)

    def prefill(system: str, ids: Tensor) -> None:
        cache = new_cache(SPEC if system == KVKEEP else system, loaded)
        with torch.inference_mode():
            models[system](ids, **as_cache(models[system], cache), logits_to_keep=1)

    rows, work = [], Work(progress, sum(asked.lengths))
    for length in asked.lengths:
        work.stage(f"{length} tokens", length)
        ids = tokens_of_text(tokenizer, length)
        calls = {system: partial(prefill, system, ids) for system in models}
        medians = medians_of(calls, turns=asked.turns, burst=1, tick=work.part)
        rows += [
            {"system": system, "length": length, "median_s": s, "ratio": medians[DYNAMIC] / s}
            for system, s in medians.items()
        ]
    return result("prefill", rows, **asked.some("model", "dtype"))
