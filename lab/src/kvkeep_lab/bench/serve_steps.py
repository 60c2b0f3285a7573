"""Steps of many sequences: their processor time, and how long a new prompt delays them."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from kvkeep.errors import SpecError
from kvkeep.host.progress import Progress, Work
from kvkeep_lab.bench.contenders import COMPILED, UNIFIED, contenders_of
from kvkeep_lab.bench.options import Serve
from kvkeep_lab.bench.systems import LLAMA_CPP
from kvkeep_lab.bench.timing import Call, interleaved, spread
from kvkeep_lab.bench.workload import Session, quantile

CHUNK = 256  # tokens of a prompt that a step reads, see `kvkeep.Batch`
BURST = 4  # steps of a system before the next one's turn


def cpu_time(asked: Serve, progress: Progress) -> dict[str, Any]:
    """Processor time of one step in which every sequence gets a token, on one thread.

    All prompts are read before. Of the systems, kvkeep's batches and llama.cpp can be stepped. Each
    takes `repeats` + 1 times 4 steps; the first four are not counted.

    Returns:
        `rows`: `system`, `sequences`, `tokens_held` at the first step, and the median
        `cpu_ms_per_step` and its `spread_ms`: time of this process, whatever else the machine does.

    Raises:
        SpecError: a system that cannot be stepped; see also `kvkeep_lab.bench.serve.run`.
    """
    _require_steps(asked)
    rows = []
    with _one_thread(), contenders_of(asked) as (contenders, texts):
        work = Work(progress, 2 * len(contenders.names) * sum(texts))
        for count, ids in texts.items():
            with ExitStack() as during:
                new = _reading(ids) + (asked.repeats + 1) * BURST + 1
                steps: dict[str, Call] = {}
                for name in contenders.names:
                    work.stage(f"{count} sequences, {name} reads", count)
                    room = max(map(len, ids)) + new
                    session = contenders.sessions(name, count, room, during)()
                    _begin(session, ids, new)
                    steps[name] = session.step
                work.stage(f"{count} sequences, steps", len(steps) * count)
                found = interleaved(
                    steps, turns=asked.repeats, burst=BURST, timer=_processor, tick=work.part
                )
                rows += [
                    {"system": name, "sequences": count, "tokens_held": sum(map(len, ids))}
                    | {"cpu_ms_per_step": 1e3 * statistics.median(seconds)}
                    | {"spread_ms": 1e3 * spread(seconds)}
                    for name, seconds in found.items()
                ]
    return {"rows": rows, "measures": "processor time"}


def interrupted(asked: Serve, progress: Progress) -> dict[str, Any]:
    """The delay of running sequences while a long prompt is read beside them, `repeats` times, each
    after as many steps without it.

    All prompts are read before. Of the systems, kvkeep's batches and llama.cpp can be stepped.

    Returns:
        `rows`: `system`, `sequences`, `prompt`; `gap_p95_s` and `gap_max_s`, between two tokens of
        a sequence; the same with `interrupted_` before it, while the prompt is read, and `ttft_s`,
        how long that takes; and `chunk_s` and `chunk_p95_s`, of the steps that read the same prompt
        alone: the later ones attend to more tokens.

    Raises:
        SpecError: a system that cannot be stepped, or a shared prefix; see also
            `kvkeep_lab.bench.serve.run`.
    """
    tokens, repeats = asked.interrupt or 0, asked.repeats
    if asked.shared_prefix:
        raise SpecError(
            f"a shared prefix of {asked.shared_prefix} tokens: the long prompt would begin with it "
            "too, and not be read whole; leave it out"
        )
    _require_steps(asked)
    rows = []
    chunks = math.ceil(tokens / CHUNK) + 1
    with contenders_of(asked) as (contenders, texts):
        work = Work(progress, (1 + repeats) * len(contenders.names) * sum(texts))
        for count, ids in texts.items():
            whole = torch.cat(ids)
            long = whole.repeat(math.ceil(tokens / len(whole)))[:tokens]
            with ExitStack() as during:
                new = _reading(ids) + 3 * chunks * repeats + 1
                room = max(tokens + 1, max(map(len, ids)) + new)
                alone: dict[str, list[float]] = {}
                sessions: dict[str, Session] = {}
                for name in contenders.names:
                    work.stage(f"{count} sequences, {name} reads", count)
                    make = contenders.sessions(name, count + 1, room, during)
                    alone[name] = _alone(make(), long)
                    sessions[name] = make()
                    _begin(sessions[name], ids, new)
                gaps: dict[str, list[_Gaps]] = {name: [] for name in sessions}
                for turn in range(repeats):
                    for name, session in sessions.items():
                        work.stage(f"{count} sequences, {turn + 1}: {name}", count)
                        gaps[name].append(_Gaps(session, long, count + turn, chunks))
                rows += [
                    {"system": name, "sequences": count, "prompt": tokens}
                    | _summed_up(gaps[name])
                    | {"chunk_s": statistics.median(alone[name])}
                    | {"chunk_p95_s": quantile(alone[name], 0.95)}
                    for name in sessions
                ]
    return {"rows": rows, "measures": "delay"}


class _Gaps:
    """The seconds between the tokens of sequences, in steps without another prompt and in steps
    that read one."""

    def __init__(self, session: Session, prompt: Tensor, index: int, steps: int) -> None:
        self.quiet: list[float] = []
        for _ in range(steps):
            self._step(session, self.quiet)
        self.busy: list[float] = []
        session.add(index, prompt, 1)
        before = time.perf_counter()
        while index not in self._step(session, self.busy):
            pass
        self.ttft = time.perf_counter() - before

    @staticmethod
    def _step(session: Session, gaps: list[float]) -> set[int]:
        """Take a step, which gives each sequence a token; returns the sequences that got one."""
        before = time.perf_counter()
        found = {index for index, _ in session.step()}
        gaps.append(time.perf_counter() - before)
        return found


def _summed_up(found: Sequence[_Gaps]) -> dict[str, float]:
    quiet = [gap for one in found for gap in one.quiet]
    busy = [gap for one in found for gap in one.busy]
    return {
        "gap_p95_s": quantile(quiet, 0.95),
        "gap_max_s": max(quiet),
        "interrupted_gap_p95_s": quantile(busy, 0.95),
        "interrupted_gap_max_s": max(busy),
        "ttft_s": statistics.median(one.ttft for one in found),
    }


def _begin(session: Session, ids: Sequence[Tensor], new: int) -> None:
    """Read all prompts, so that each step gives every sequence a token."""
    for index, one in enumerate(ids):
        session.add(index, one, new)
    begun: set[int] = set()
    while len(begun) < len(ids):
        begun |= {index for index, _ in session.step()}


def _alone(session: Session, prompt: Tensor) -> list[float]:
    """The seconds of each step that reads a prompt, without other sequences; they are read twice,
    and the first time is not counted."""
    for _ in range(2):
        session.add(0, prompt, 1)
        seconds = []
        while session.busy:
            before = time.perf_counter()
            session.step()
            seconds.append(time.perf_counter() - before)
    return seconds


def _reading(ids: Sequence[Tensor]) -> int:
    """The most steps that reading these prompts may take."""
    return sum(len(one) // CHUNK + 2 for one in ids)


def _require_steps(asked: Serve) -> None:
    for name in asked.against or ():
        if name not in (COMPILED, LLAMA_CPP, UNIFIED):
            raise SpecError(
                f"the steps of {name!r} cannot be measured, only kvkeep's and llama.cpp's"
            )


def _processor(call: Call) -> float:
    """Seconds of this process's time, in all of its threads."""
    start = time.process_time()
    call()
    return time.process_time() - start


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
