"""Saving a cache compared with copying its file, and loading it compared with a prefill."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from kvkeep.hf.attach import attach
from kvkeep.hf.cache import Cache
from kvkeep.hf.cache_argument import as_cache
from kvkeep.hf.models import load as load_model
from kvkeep.host.progress import Progress, Work, silent
from kvkeep.host.saving import load
from kvkeep_lab.bench.options import Save
from kvkeep_lab.bench.record import result
from kvkeep_lab.bench.text import tokens_of_text
from kvkeep_lab.bench.timing import Call, medians_of, on_host


def run(asked: Save, progress: Progress = silent) -> dict[str, Any]:
    """Prefill a prompt of real text, save its cache, load it and continue.

    Returns:
        `rows`: for each spec `prefill_s`; `save_mb_per_s` and `copy_mb_per_s`, both with fsync, and
        their `ratio`; `file_ratio`, the file's bytes divided by live bytes; `load_s`, with all
        checksums; `first_token_s`, for loading and one step; and `times_faster`, the prefill
        divided by that.
    """
    loaded, tokenizer = load_model(asked.model, asked.dtype, progress=progress)
    attach(loaded)
    ids = tokens_of_text(tokenizer, asked.tokens + 1)
    rows, work = [], Work(progress, 3 * len(asked.specs))
    for spec in asked.specs:
        work.stage(f"{spec}, {asked.tokens} tokens")
        with TemporaryDirectory(dir=asked.directory) as folder, torch.inference_mode():
            figures = _figures(loaded, spec, ids, Path(folder), asked.turns, work)
        rows.append({"system": spec, "tokens": asked.tokens, **figures})
    return result("save", rows, **asked.some("model", "dtype"))


def _figures(
    model: Any, spec: str, ids: Tensor, folder: Path, turns: int, work: Work
) -> dict[str, float]:
    cache, path = Cache(model, spec), folder / "cache.kv"

    def step(cache: Any, ids: Tensor) -> None:
        model(ids, **as_cache(model, cache), logits_to_keep=1)

    prefill = on_host(lambda: step(cache, ids[:, :-1]))
    cache.save(path)
    writing: dict[str, Call] = {
        "save": lambda: cache.save(path),
        "copy": lambda: _copy(path, path.with_name("copy")),
    }
    reading: dict[str, Call] = {
        "load": lambda: load(path, model),
        "first token": lambda: step(load(path, model), ids[:, -1:]),
    }

    work.stage(f"{spec}, saving")
    seconds = medians_of(writing, turns=2 * turns, burst=1, tick=work.part)
    work.stage(f"{spec}, loading")
    seconds |= medians_of(reading, turns=turns, burst=1, tick=work.part)
    size = path.stat().st_size
    return {
        "prefill_s": prefill,
        "save_mb_per_s": size / seconds["save"] / 1e6,
        "copy_mb_per_s": size / seconds["copy"] / 1e6,
        "ratio": seconds["copy"] / seconds["save"],
        "file_ratio": size / cache.live_bytes,
        "load_s": seconds["load"],
        "first_token_s": seconds["first token"],
        "times_faster": prefill / seconds["first token"],
    }


def _copy(source: Path, target: Path) -> None:
    """Copy a file with the system's own call, and fsync the copy."""
    shutil.copyfile(source, target)
    with target.open("rb") as file:
        os.fsync(file.fileno())
