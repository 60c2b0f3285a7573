"""Many sequences at once: throughput and delays beside other systems, the processor time of their
steps, and how long a new prompt delays them."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvkeep.errors import SpecError
from kvkeep.host.progress import Progress, Work, silent
from kvkeep_lab.bench.contenders import (
    AGAINST,
    COMPILED,
    PADDED,
    SERVER,
    UNIFIED,
    Contenders,
    Run,
    contenders_of,
)
from kvkeep_lab.bench.device import because, with_values
from kvkeep_lab.bench.options import Serve
from kvkeep_lab.bench.record import result
from kvkeep_lab.bench.systems import KVKEEP, LLAMA_CPP
from kvkeep_lab.bench.timing import Call, interleaved, on_host, spread, using_threads
from kvkeep_lab.bench.workload import (
    Request,
    Served,
    Session,
    agreement,
    figures,
    poisson,
    quantile,
)
from kvkeep_lab.checks import require_known

ARRIVALS = AT_ONCE, POISSON = "at once", "poisson"

_WARM = 32  # tokens of each prompt of a warm-up
_CHUNK = 256  # tokens of a prompt that a step reads, see `kvkeep.Batch`
_BURST = 4  # steps of a system before the next one's turn


def run(asked: Serve, progress: Progress = silent) -> dict[str, Any]:
    """Answer prompts of real text, greedily and without an end token; a random model gets random
    tokens. With `cpu_time` or `interrupt`, see `_cpu_time` and `_interrupted`.

    All systems have the same weights and prompts. They run in turn, after a short warm-up each.
    "poisson" has no single sequence and no padded batch.

    Returns:
        `rows`: for each number of sequences, arrivals and system the figures of
        `kvkeep_lab.bench.workload.figures`; `agreement` with the first system, the share of tokens
        before the first that differs; `rate_per_s`; and `skipped`, why it was not measured.

    Raises:
        SpecError, UnsupportedError, MissingPackageError: see `Contenders`.
        ShapeError: the prompts are longer than the text, or than the model's context.
    """
    steps = _cpu_time if asked.cpu_time else _interrupted
    stepped = asked.cpu_time or asked.interrupt is not None
    against = asked.against
    if against is None:
        against = () if stepped else AGAINST
    asked = replace(asked, against=[*against, SERVER] if asked.http else against)
    if stepped:
        require_known("steps of", asked.against or (), (COMPILED, LLAMA_CPP, UNIFIED))
    require_known("arrivals", asked.arrivals, ARRIVALS)
    if not stepped and asked.rate is None and AT_ONCE not in asked.arrivals:
        raise SpecError(f"{POISSON} without {AT_ONCE} needs a rate, such as 1 prompt per second")
    measured = steps(asked, progress) if stepped else _answered(asked, progress)
    about = asked.some("model", "dtype", "shared_prefix")
    return result("serve", with_values(measured.pop("rows")), **about, **measured)


def _answered(asked: Serve, progress: Progress) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    with contenders_of(asked) as (contenders, texts):
        runs = (1 + len(asked.arrivals) * asked.repeats) * len(contenders.names)  # the most of each
        work = Work(progress, runs * sum(texts))
        for count, ids in texts.items():
            room = max(map(len, ids)) + asked.new_tokens
            with ExitStack() as during:
                table = _Table(contenders, count, asked, work)
                warm = [Request(one[: asked.shared_prefix + _WARM]) for one in ids[:2]]
                table.prepare(room, warm, during)
                if AT_ONCE in asked.arrivals:
                    rows += table.measure(AT_ONCE, [Request(one) for one in ids], None)
                if POISSON in asked.arrivals and count > 1:
                    per_second = asked.rate or table.speed / asked.new_tokens
                    rows += table.measure(POISSON, poisson(ids, per_second), per_second)
    sizes = {count: sum(map(len, ids)) for count, ids in texts.items()}
    return {"rows": rows, **asked.some("new_tokens", "repeats"), "prompt_tokens": sizes}


class _Table:
    """The rows of one number of sequences."""

    def __init__(self, contenders: Contenders, sequences: int, asked: Serve, work: Work) -> None:
        self._contenders, self._sequences = contenders, sequences
        self._new, self._repeats, self._work = asked.new_tokens, asked.repeats, work
        self._runs: dict[str, Run] = {}
        self._skipped: dict[str, str] = {}
        self.speed = 0.0  # tokens per second of the first system, when last measured

    def prepare(self, room: int, warm: Sequence[Request], during: ExitStack) -> None:
        """Make all systems ready for sequences of `room` tokens, and run each on a few. What
        another library cannot do is the reason why its rows are skipped."""
        for name in self._contenders.names:
            self._work.stage(f"{self._sequences} sequences, preparing {name}", self._sequences)
            with self._unless_it_fails(name):
                self._runs[name] = self._contenders.runs(name, self._sequences, room, during)
                self._runs[name](warm, 2)

    def measure(
        self, arrivals: str, requests: Sequence[Request], rate: float | None
    ) -> list[dict[str, Any]]:
        """The rows of requests that arrive in one way."""
        names = [x for x in self._contenders.names if x != PADDED or arrivals == AT_ONCE]
        runs: dict[str, list[Served]] = {name: [] for name in names}
        for turn in range(self._repeats):
            for name in (name for name in names if name not in self._skipped):
                doing = f"{self._sequences} sequences, {arrivals}, {turn + 1}: {name}"
                self._work.stage(doing, self._sequences)
                with self._unless_it_fails(name):
                    runs[name].append(self._runs[name](requests, self._new))
        first = runs[names[0]][0]
        self.speed = statistics.median(figures(x)["tokens_per_s"] or 0 for x in runs[names[0]])
        about = {"sequences": self._sequences, "arrivals": arrivals, "new_tokens": self._new}
        return [
            {"system": name, **about, "rate_per_s": rate}
            | (_medians([figures(one) for one in mine]) if mine else {})
            | {"agreement": agreement(mine[0], first) if mine else None}
            | {"skipped": self._skipped.get(name)}
            for name, mine in runs.items()
        ]

    @contextmanager
    def _unless_it_fails(self, name: str) -> Iterator[None]:
        """Go on without a system that failed, unless it is kvkeep."""
        try:
            yield
        except Exception as error:
            if name.startswith(KVKEEP):
                raise
            self._skipped[name] = because(error)


def _medians(found: Sequence[dict[str, float | None]]) -> dict[str, float | None]:
    """The median of each figure; None if it is missing in any."""
    medians: dict[str, float | None] = {}
    for name in found[0]:
        values = [x for one in found if (x := one[name]) is not None]
        medians[name] = statistics.median_low(values) if len(values) == len(found) else None
    return medians


def _cpu_time(asked: Serve, progress: Progress) -> dict[str, Any]:
    """Processor time of one step in which every sequence gets a token, on one thread.

    All prompts are read before. Of the systems, kvkeep's batches and llama.cpp can be stepped. Each
    takes `repeats` + 1 times 4 steps; the first four are not counted.

    Returns:
        `rows`: `system`, `sequences`, `tokens_held` at the first step, and the median
        `cpu_ms_per_step` and its `spread_ms`: time of this process, whatever else the machine does.

    Raises:
        SpecError: a system that cannot be stepped; see also `kvkeep_lab.bench.serve.run`.
    """
    rows, processor = [], partial(on_host, clock=time.process_time)
    with using_threads(1), contenders_of(asked) as (contenders, texts):
        work = Work(progress, 2 * len(contenders.names) * sum(texts))
        for count, ids in texts.items():
            with ExitStack() as during:
                new = _reading(ids) + (asked.repeats + 1) * _BURST + 1
                steps: dict[str, Call] = {}
                for name in contenders.names:
                    work.stage(f"{count} sequences, {name} reads", count)
                    room = max(map(len, ids)) + new
                    session = contenders.sessions(name, count, room, during)()
                    _begin(session, ids, new)
                    steps[name] = session.step
                work.stage(f"{count} sequences, steps", len(steps) * count)
                timed = partial(interleaved, turns=asked.repeats, burst=_BURST, timer=processor)
                found = timed(steps, tick=work.part)
                rows += [
                    {"system": name, "sequences": count, "tokens_held": sum(map(len, ids))}
                    | {"cpu_ms_per_step": 1e3 * statistics.median(seconds)}
                    | {"spread_ms": 1e3 * spread(seconds)}
                    for name, seconds in found.items()
                ]
    return {"rows": rows, "measures": "processor time"}


def _interrupted(asked: Serve, progress: Progress) -> dict[str, Any]:
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
    rows = []
    chunks = math.ceil(tokens / _CHUNK) + 1
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
                gaps = {name: _Gaps() for name in sessions}
                for turn in range(repeats):
                    for name, session in sessions.items():
                        work.stage(f"{count} sequences, {turn + 1}: {name}", count)
                        gaps[name].measure(session, long, count + turn, chunks)
                rows += [
                    {"system": name, "sequences": count, "prompt": tokens}
                    | gaps[name].figures()
                    | {"chunk_s": statistics.median(alone[name])}
                    | {"chunk_p95_s": quantile(alone[name], 0.95)}
                    for name in sessions
                ]
    return {"rows": rows, "measures": "delay"}


@dataclass
class _Gaps:
    """The seconds between the tokens of sequences, in steps without another prompt and in steps
    that read one."""

    quiet: list[float] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)
    ttft: list[float] = field(default_factory=list)

    def measure(self, session: Session, prompt: Tensor, index: int, steps: int) -> None:
        """Take steps without the prompt, and read it."""
        self.quiet += [on_host(session.step) for _ in range(steps)]
        session.add(index, prompt, 1)
        before = len(self.busy)
        _step_until(session, {index}, self.busy)
        self.ttft.append(sum(self.busy[before:]))

    def figures(self) -> dict[str, float]:
        """The figures of a row."""
        return {
            "gap_p95_s": quantile(self.quiet, 0.95),
            "gap_max_s": max(self.quiet),
            "interrupted_gap_p95_s": quantile(self.busy, 0.95),
            "interrupted_gap_max_s": max(self.busy),
            "ttft_s": statistics.median(self.ttft),
        }


def _step_until(session: Session, left: set[int], seconds: list[float]) -> None:
    """Take steps until each of some prompts has a token, and note their seconds."""
    while left:
        before = time.perf_counter()
        found = {index for index, _ in session.step()}
        seconds.append(time.perf_counter() - before)
        left -= found


def _begin(session: Session, ids: Sequence[Tensor], new: int) -> None:
    """Read all prompts, so that each step gives every sequence a token."""
    for index, one in enumerate(ids):
        session.add(index, one, new)
    _step_until(session, set(range(len(ids))), [])


def _alone(session: Session, prompt: Tensor) -> list[float]:
    """The seconds of each step that reads a prompt, without other sequences; they are read twice,
    and the first time is not counted."""
    for _ in range(2):
        session.add(0, prompt, 1)
        seconds = list[float]()
        _step_until(session, {0}, seconds)
    return seconds


def _reading(ids: Sequence[Tensor]) -> int:
    """The most steps that reading these prompts may take."""
    return sum(len(one) // _CHUNK + 2 for one in ids)
