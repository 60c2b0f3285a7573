"""Many sequences at once: throughput and delays, beside other systems."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from kvkeep.errors import SpecError
from kvkeep.host.progress import Progress, Work, silent
from kvkeep_lab.bench import serve_steps
from kvkeep_lab.bench.contenders import (
    ALONE,
    COMPILED,
    CONTINUOUS,
    PADDED,
    SERVER,
    Contenders,
    Run,
    contenders_of,
)
from kvkeep_lab.bench.device import because, with_values
from kvkeep_lab.bench.options import Serve
from kvkeep_lab.bench.record import result
from kvkeep_lab.bench.workload import Request, Served, agreement, figures, poisson
from kvkeep_lab.checks import require_known

AGAINST = (ALONE, COMPILED, PADDED, CONTINUOUS)
ARRIVALS = AT_ONCE, POISSON = "at once", "poisson"

_WARM = 32  # tokens of each prompt of a warm-up


def run(asked: Serve, progress: Progress = silent) -> dict[str, Any]:
    """Answer prompts of real text, greedily and without an end token; a random model gets random
    tokens. With `cpu_time` or `interrupt`, see `kvkeep_lab.bench.serve_steps`.

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
    steps = serve_steps.cpu_time if asked.cpu_time else serve_steps.interrupted
    stepped = asked.cpu_time or asked.interrupt is not None
    against = asked.against
    if against is None:
        against = () if stepped else AGAINST
    asked = replace(asked, against=[*against, SERVER] if asked.http else against)
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
            try:
                self._runs[name] = self._contenders.runs(name, self._sequences, room, during)
                self._runs[name](warm, 2)
            except Exception as error:
                self._skip(name, error)

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
                try:
                    runs[name].append(self._runs[name](requests, self._new))
                except Exception as error:
                    self._skip(name, error)
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

    def _skip(self, name: str, error: Exception) -> None:
        """Go on without a system that failed, unless it is kvkeep."""
        if name in (*self._contenders.kvkeep, ALONE, COMPILED, SERVER):
            raise error
        self._skipped[name] = because(error)


def _medians(found: Sequence[dict[str, float | None]]) -> dict[str, float | None]:
    """The median of each figure; None if it is missing in any."""
    medians: dict[str, float | None] = {}
    for name in found[0]:
        values = [x for one in found if (x := one[name]) is not None]
        medians[name] = statistics.median_low(values) if len(values) == len(found) else None
    return medians
