"""Many sequences at once: throughput and delays, beside other systems."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import Tensor

from kvkeep.errors import SpecError
from kvkeep.host.progress import Progress, Work, silent
from kvkeep.spec import parse_specs
from kvkeep_lab.bench.contenders import (
    ALONE,
    COMPILED,
    CONTINUOUS,
    OTHERS,
    PADDED,
    SERVER,
    Contenders,
    Run,
)
from kvkeep_lab.bench.device import because, device_named, with_values
from kvkeep_lab.bench.random_model import model_named
from kvkeep_lab.bench.record import result
from kvkeep_lab.bench.systems import SPEC
from kvkeep_lab.bench.workload import (
    LONGEST,
    SHORTEST,
    Request,
    Served,
    agreement,
    at_once,
    figures,
    lengths,
    poisson,
    prompts,
)
from kvkeep_lab.checks import require_known

SEQUENCES = (1, 4, 16, 64)
AGAINST = (ALONE, COMPILED, PADDED, CONTINUOUS)
ARRIVALS = AT_ONCE, POISSON = "at once", "poisson"

_WARM = 32  # tokens of each prompt of a warm-up


@dataclass(frozen=True)
class ServeOptions:
    """Options of the benchmarks of many sequences.

    Args:
        model: a name from `kvkeep models`, a directory, or a hub name; or "random-1b", random
            weights in the shape of Llama 3.2 1B, which get random tokens.
        device: device to measure on; None: CUDA if available.
        dtype: dtype of weights and caches.
        sequences: how many there are; each number is measured by itself.
        specs: cache specs of kvkeep; each is a system, named "kvkeep" for keep_all and otherwise
            "kvkeep SPEC". Linear layers are kvkeep's.
        against: some of "kvkeep alone" (one sequence after the other, with the first spec), "kvkeep
            compiled" (with steps in compiled graphs), "transformers padded" (`generate` on a padded
            batch), "transformers generate_batch" (its continuous batching), "llama.cpp" (needs
            llama-cpp-python; one batch of all sequences), "llama.cpp unified" (one buffer for their
            slots), and "kvkeep serve" (a process of its own, through HTTP).
        shared: tokens of the prefix of all prompts. Systems that can share it hold it before the
            first prompt comes.
        shortest, longest: tokens of the shortest and longest prompts, without the shared prefix;
            there are more short prompts than long ones.
    """

    model: str = "smollm2-135m"
    device: str | None = None
    dtype: str = "bfloat16"
    sequences: Sequence[int] = SEQUENCES
    specs: Sequence[str] = (SPEC,)
    against: Sequence[str] = AGAINST
    shared: int = 0
    shortest: int = SHORTEST
    longest: int = LONGEST

    @contextmanager
    def contenders(self) -> Iterator[tuple[Contenders, dict[int, list[Tensor]]]]:
        """The systems, and the prompts (n,) for each number of sequences."""
        require_known("system", self.against, (*OTHERS, SERVER))
        for spec in self.specs:
            parse_specs(spec)
        model, tokenizer = model_named(self.model, self.dtype, device_named(self.device))
        texts = {
            count: prompts(
                tokenizer,
                model.config.vocab_size,
                lengths(count, self.shortest, self.longest),
                self.shared,
            )
            for count in self.sequences
        }
        prefix = next(iter(texts.values()))[0][: self.shared] if self.shared else None
        with TemporaryDirectory() as directory:
            place = Path(directory)
            yield (
                Contenders(model, tokenizer, self.specs, self.against, place, prefix),
                texts,
            )

    def result(self, rows: Sequence[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """A benchmark's result with these rows."""
        about = {"model": self.model, "dtype": self.dtype, "shared_prefix": self.shared, **more}
        return result("serve", with_values(rows), **about)


def run(
    asked: ServeOptions,
    *,
    new_tokens: int = 64,
    arrivals: Sequence[str] = ARRIVALS,
    rate: float | None = None,
    repeats: int = 3,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Answer prompts of real text, greedily and without an end token.

    All systems have the same weights and prompts. They run in turn, after a short warm-up each.

    Args:
        new_tokens: tokens of each answer.
        arrivals: "at once", or "poisson", of which a single sequence and a padded batch have none.
        rate: prompts per second that arrive in "poisson"; None: as many as the first system
            completed per second when they came at once.
        repeats: how often each system runs; figures are medians.

    Returns:
        `rows`: for each number of sequences, arrivals and system the figures of
        `kvkeep_lab.bench.workload.figures`; `agreement` with the first system, the share of tokens
        before the first that differs; `rate_per_s`; and `skipped`, why it was not measured.

    Raises:
        SpecError, UnsupportedError, MissingPackageError: see `Contenders`.
        ShapeError: the prompts are longer than the text, or than the model's context.
    """
    require_known("arrivals", arrivals, ARRIVALS)
    if rate is None and AT_ONCE not in arrivals:
        raise SpecError(f"{POISSON} without {AT_ONCE} needs a rate, such as 1 prompt per second")
    rows: list[dict[str, Any]] = []
    with asked.contenders() as (contenders, texts):
        runs = (1 + len(arrivals) * repeats) * len(contenders.names)  # the most of each
        work = Work(progress, runs * sum(texts))
        for count, ids in texts.items():
            room = max(map(len, ids)) + new_tokens
            with ExitStack() as during:
                table = _Table(contenders, count, new_tokens, repeats, work)
                warm = [Request(one[: asked.shared + _WARM]) for one in ids[:2]]
                table.prepare(room, warm, during)
                if AT_ONCE in arrivals:
                    rows += table.measure(AT_ONCE, at_once(ids), None)
                if POISSON in arrivals and count > 1:
                    per_second = rate or table.speed / new_tokens
                    rows += table.measure(POISSON, poisson(ids, per_second), per_second)
    sizes = {count: sum(map(len, ids)) for count, ids in texts.items()}
    return asked.result(rows, new_tokens=new_tokens, repeats=repeats, prompt_tokens=sizes)


class _Table:
    """The rows of one number of sequences."""

    def __init__(
        self,
        contenders: Contenders,
        sequences: int,
        new: int,
        repeats: int,
        work: Work,
    ) -> None:
        self._contenders, self._sequences = contenders, sequences
        self._new, self._repeats, self._work = new, repeats, work
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
    columns = {name: [one[name] for one in found] for name in found[0]}
    return {
        name: None
        if None in values
        else statistics.median_low([x for x in values if x is not None])
        for name, values in columns.items()
    }
