"""Saving a cache compared with copying its file, and loading it compared with a prefill."""

from __future__ import annotations

import os
import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from kvkeep.hf.attach import attach
from kvkeep.hf.cache import Cache
from kvkeep.hf.cache_argument import as_cache
from kvkeep.hf.models import load as load_model
from kvkeep.host.progress import Progress, Work, silent
from kvkeep.host.saving import load
from kvkeep_lab.bench.record import result
from kvkeep_lab.bench.text import tokens_of_text
from kvkeep_lab.bench.timing import interleaved


def run(
    model: str = "smollm2-135m",
    *,
    dtype: str = "float32",
    tokens: int = 7900,
    specs: Sequence[str] = ("keep_all", "keep_all+int8"),
    turns: int = 5,
    directory: Path | None = None,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Prefill a prompt of real text, save its cache, load it and continue.

    Args:
        directory: directory for the files; None: the system's directory for temporary files.

    Returns:
        `rows`: for each spec `prefill_s`; `save_mb_per_s` and `copy_mb_per_s`, both with fsync, and
        their `ratio`; `file_ratio`, the file's bytes divided by live bytes; `load_s`, with all
        checksums; `first_token_s`, for loading and one step; and `times_faster`, the prefill
        divided by that.
    """
    loaded, tokenizer = load_model(model, dtype, progress=progress)
    attach(loaded)
    ids = tokens_of_text(tokenizer, tokens + 1)
    rows, work = [], Work(progress, len(specs))
    for spec in specs:
        work.stage(f"{spec}, {tokens} tokens")
        with TemporaryDirectory(dir=directory) as folder, torch.inference_mode():
            rows.append(
                {"system": spec, "tokens": tokens} | _row(loaded, spec, ids, folder, turns, work)
            )
    return result("save", rows, model=model, dtype=dtype)


def _row(
    model: Any, spec: str, ids: torch.Tensor, folder: str, turns: int, work: Work
) -> dict[str, float]:
    cache = Cache(model, spec)
    start = time.perf_counter()
    model(ids[:, :-1], **as_cache(model, cache), logits_to_keep=1)
    prefill = time.perf_counter() - start
    path = Path(folder) / "cache.kv"

    def load_and_step() -> None:
        model(ids[:, -1:], **as_cache(model, load(path, model)))

    cache.save(path)
    writing: dict[str, Callable[[], object]] = {
        "save": lambda: cache.save(path),
        "copy": lambda: _copy(path, path.with_name("copy")),
    }
    reading: dict[str, Callable[[], object]] = {
        "load": lambda: load(path, model),
        "first token": load_and_step,
    }

    def half(share: float) -> None:
        work.part(share / 2)

    found = interleaved(writing, turns=2 * turns, burst=1, tick=half)
    found |= interleaved(reading, turns=turns, burst=1, tick=half)
    seconds = {name: statistics.median(times) for name, times in found.items()}
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
