"""Generation beside busy processes: with one thread, all, and as many as kvkeep chooses."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from statistics import median
from time import perf_counter, sleep
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from kvkeep import threads
from kvkeep.generate import Batch, SamplingParams
from kvkeep.hf.attach import attach
from kvkeep.host.progress import Progress, Work, silent
from kvkeep_lab.bench.options import Decode
from kvkeep_lab.bench.random_model import model_named
from kvkeep_lab.bench.record import result
from kvkeep_lab.bench.systems import EAGER, FUSED, PLAIN, named, twin
from kvkeep_lab.bench.text import tokens_of_text
from kvkeep_lab.bench.timing import using_threads
from kvkeep_lab.checks import require_known

BATCH = "batch"
WAYS = (PLAIN, EAGER, FUSED, BATCH)
CHOSEN, ONE, ALL = "chosen", "one", "all"

_CONTEXT = 128  # tokens of the prompt
_SEQUENCES = 4  # of a batch
_SETTLED_S = 0.5  # until the processes run, or are gone
_BUSY = "while True: pass"


def run(
    asked: Decode, progress: Progress = silent, *, tokens: int = 24, turns: int = 3
) -> dict[str, Any]:
    """Generate text beside busy processes, which this starts and ends.

    Args:
        asked: its `beside` are numbers of busy processes, and its `ways` how kvkeep's steps run:
            "default" (as `attach(model)` makes them), "eager" (without kvkeep's linear layers),
            "compile", and "batch" (a `Batch` of four sequences).
        tokens: generated tokens of each measurement; a quarter with all threads beside others.
        turns: measurements of each case, which take turns.

    Returns:
        `rows`: for each way and number of busy processes (`beside`) and for `threads` "chosen" (by
        kvkeep), "one" and "all", the median `tokens_per_s`; and `ratio`, kvkeep's choice
        compared with the better of one and all.

    Raises:
        SpecError: a way does not exist.
    """
    ways, beside = asked.ways or WAYS, asked.beside or (0,)
    require_known("way", ways, WAYS)
    loaded, tokenizer = model_named(asked.model, asked.dtype, torch.device("cpu"))
    ids = tokens_of_text(tokenizer, _CONTEXT)
    generators = {way: _generator(twin(loaded), way, ids) for way in ways}
    for generate in generators.values():
        generate(4)  # compiles
    rows, work = [], Work(progress, len(beside) * turns)
    for busy in beside:
        found: dict[tuple[str, str], list[float]] = {}
        with busy_processes(busy):
            for _ in range(turns):
                work.stage(f"{busy} busy processes", 1)
                for way, generate in generators.items():
                    for choice in (CHOSEN, ONE, ALL):
                        some = max(4, tokens // 4) if choice == ALL and busy else tokens
                        with _threads(choice):
                            generate(1)
                            found.setdefault((way, choice), []).append(generate(some))
        speeds = {case: median(each) for case, each in found.items()}
        for (way, choice), speed in speeds.items():
            best = max(speeds[way, ONE], speeds[way, ALL])
            system = way if way == BATCH else named("keep_all", way)
            ratio = speed / best if choice == CHOSEN else None
            row = {"system": system, "beside": busy, "threads": choice}
            rows.append({**row, "tokens_per_s": speed, "ratio": ratio})
    return result("decode beside others", rows, **asked.some("model", "dtype"), context=_CONTEXT)


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Run this many processes, each of which keeps a core busy."""
    with ExitStack() as running:
        running.callback(sleep, _SETTLED_S)
        for _ in range(count):
            process = running.enter_context(subprocess.Popen([sys.executable, "-c", _BUSY]))
            running.callback(process.kill)
        sleep(_SETTLED_S)
        yield


@contextmanager
def _threads(choice: str) -> Iterator[None]:
    """Generate with one thread, with all, or with the number that kvkeep chooses."""
    count = 1 if choice == ONE else torch.get_num_threads()
    with patch.dict(os.environ), using_threads(count):
        os.environ.pop(threads.OFF, None)
        if choice != CHOSEN:
            os.environ[threads.OFF] = "fixed"
        yield


def _generator(model: Any, way: str, ids: Tensor) -> Callable[[int], float]:
    """A function that generates tokens and returns how many it made in a second."""
    attach(model, linears=way != EAGER, compile=way == FUSED)
    config = model.generation_config
    config.do_sample, config.eos_token_id = False, None

    def one(tokens: int) -> float:
        start = perf_counter()
        model.generate(ids, max_new_tokens=tokens)
        return tokens / (perf_counter() - start)

    def several(tokens: int) -> float:
        batch = Batch(model, sequences=_SEQUENCES)
        params = SamplingParams(max_new_tokens=tokens, end_tokens=frozenset())
        start = perf_counter()
        for _ in range(_SEQUENCES):
            batch.add(ids[0], params)
        list(batch)
        return _SEQUENCES * tokens / (perf_counter() - start)

    return several if way == BATCH else one
