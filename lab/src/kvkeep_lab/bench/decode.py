"""Decode steps at growing contexts: the slope of their time is the cost of the cache."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from kvkeep.hf.quantised import quantise
from kvkeep.host.progress import Progress, Work, silent
from kvkeep_lab.bench import beside
from kvkeep_lab.bench.decode_loop import bytes_per_token
from kvkeep_lab.bench.device import Limits, bandwidth, device_named, with_values
from kvkeep_lab.bench.options import Decode
from kvkeep_lab.bench.random_model import RANDOM, model_named
from kvkeep_lab.bench.record import result
from kvkeep_lab.bench.systems import (
    LITGPT,
    LLAMA_CPP,
    STEPS_AHEAD,
    BaseSystems,
    Feed,
    Systems,
    chosen,
    labels,
)
from kvkeep_lab.bench.text import tokens_of_text
from kvkeep_lab.bench.timing import interleaved, spread, timer_for

TOLERANCE = 0.1
"""Largest difference from DynamicCache's logits, relative to their norm, that different rounding to
bfloat16 can explain; also the largest difference of tied logits, in standard deviations."""

_EMPTY = dict.fromkeys(("median_ms", "spread_ms", "agrees", "error", "skipped"))

STEPS_COMPARED = 6  # enough that a CUDA graph replays the last ones


def run(asked: Decode, progress: Progress = silent) -> dict[str, Any]:
    """Time single-token steps of a model over contexts of real text, with one row.

    All systems have the same weights and hold the same tokens, and are measured in turn. A random
    model's caches get random content. With `weights`, llama.cpp's are Q8_0 or Q4_K_M. With LitGPT,
    `ways` are "default" and "eager", and its own cache takes the place of hf-dynamic. With
    `beside`, see `kvkeep_lab.bench.beside.run`.

    Returns:
        `rows` (`system`, `spec` of kvkeep's, `context`, `median_ms`, `spread_ms`; if hf-dynamic is
        measured too, `error`, the largest difference from its logits over a few greedy steps,
        relative to their norm, and `agrees`, whether that is within `tolerance` and the greedy
        tokens are the same or tied; `skipped`, the reason why a case was not measured),
        `slope_us_per_token` of each system by least squares, and `bandwidth_floor_us_per_token`:
        one token's bytes divided by the bandwidth measured in this run.

    Raises:
        SpecError: a system or a spec does not exist.
        ModelError: the model, dtype or device does not exist here.
        UnsupportedError: llama.cpp is not installed, or cannot run this model.
    """
    if asked.beside is not None:
        return beside.run(asked, progress)
    place = device_named(asked.device)
    longer = (2048, 8192, 32768, 131072) if asked.model in RANDOM else (128, 2048, 7936)
    contexts, asked = asked.contexts or longer, chosen(asked, place)
    limits = Limits(place, asked.seconds)
    loaded, tokenizer = model_named(asked.model, asked.dtype, place)
    table = _Table(limits, asked.turns, asked.burst)
    rates, work = [bandwidth(place)], Work(progress, 2 * sum(contexts))
    with TemporaryDirectory() as directory:
        systems = _prepared(loaded, asked, Path(directory))
        for context in contexts:
            work.stage(f"{context} tokens", context)
            ids = None
            if tokenizer is not None:
                ids = tokens_of_text(tokenizer, context + 1).to(place)
            table.prepare(systems, context, ids)
        work.stage("steps", sum(contexts))
        table.measure(work)
    if not limits.failed:
        rates.append(bandwidth(place))
    rate = statistics.median(rate for _, rate in rates)
    found = with_values([*table.rows.values()])
    return result(
        "decode",
        found,
        **asked.some("model", "dtype", "weights", "host"),
        tolerance=TOLERANCE,
        slope_us_per_token={name: _slope(found, name) for name in systems.names},
        bandwidth_floor_us_per_token=bytes_per_token(loaded) / rate / 1e3,
        **{rates[0][0]: rate},
    )


def _prepared(model: Any, asked: Decode, directory: Path) -> BaseSystems:
    """The systems to measure, with the weights of a model, which are quantised first."""
    weights = asked.weights
    if LLAMA_CPP in (asked.against or ()):
        llama_cpp = import_module("kvkeep_lab.bench.llama_cpp")
        llama_cpp.require(model)
        if weights is not None:
            llama_cpp.write_quantised(model, weights, directory)
    if weights is not None:
        quantise(model, weights)
    if asked.host == LITGPT:
        litgpt_systems = import_module("kvkeep_lab.bench.litgpt_systems")
        found: BaseSystems = litgpt_systems.LitGPTSystems(model, asked)
        return found
    return Systems(model, asked, directory)


class _Table:
    """Collects the rows."""

    def __init__(self, limits: Limits, turns: int, burst: int) -> None:
        self.limits, self.turns, self.burst = limits, turns, burst
        self._steps: dict[tuple[str, int], Callable[[], object]] = {}
        self.rows: dict[tuple[str, int], dict[str, Any]] = {}  # by system and context

    def prepare(self, systems: BaseSystems, context: int, ids: Tensor | None) -> None:
        """Add a row for each system at a context, and prepare its steps if it can run."""
        systems.hold(context, ids, context + (self.turns + 1) * self.burst + STEPS_AHEAD)
        token, tokens = systems.token, [systems.token]
        feeds: dict[str, Feed] = {}
        logits: dict[str, list[Tensor]] = {}
        for name in systems.names:
            row = self.rows[name, context] = {**labels(name), "context": context, **_EMPTY}
            made = partial(systems.feed, name)
            feed, row["skipped"] = self.limits.attempt(made, systems.bytes_of(context))
            if feed is not None:
                feeds[name] = feed
        first = systems.lead  # it picks the tokens
        for name in sorted(feeds, key=lambda name: name != first):
            row = self.rows[name, context]
            steps = partial(followed, feeds[name], tokens, lead=name == first)
            seconds = systems.seconds_of(name)
            own, row["skipped"] = self.limits.attempt(steps, seconds=seconds)
            if own is not None:
                logits[name] = own
                self._steps[name, context] = partial(feeds[name], token)
        for name, mine in logits.items():
            if mine and first in logits:
                row = self.rows[name, context]
                row["error"], row["agrees"] = compared(mine, logits[first])

    def measure(self, work: Work) -> None:
        """Time all steps. Contexts are interleaved too, so that drift does not look like a
        slope."""
        steps = {key: self._steps[key] for key in self.rows if key in self._steps}
        timer = timer_for(self.limits.device)
        measured = partial(
            interleaved, steps, turns=self.turns, burst=self.burst, timer=timer, tick=work.part
        )
        timed, reason = self.limits.attempt(measured, needed=None)
        for key in steps:
            row = self.rows[key]
            if timed is None:
                row["skipped"] = reason
            else:
                row["median_ms"] = statistics.median(timed[key]) * 1e3
                row["spread_ms"] = spread(timed[key]) * 1e3


def followed(feed: Feed, tokens: list[Tensor], *, lead: bool) -> list[Tensor]:
    """Feed `tokens` one by one and return the logits of each step, on the host. With `lead`, the
    greedy choice of each step is appended to `tokens`."""
    found = []
    for step in range(STEPS_COMPARED):
        if not lead and step == len(tokens):
            break  # no system has chosen further tokens
        logits = feed(tokens[step])
        if logits is None:
            return []
        # Copy: a CUDA graph's next step writes to the same memory.
        found.append(logits.detach().to("cpu", torch.float32, copy=True))
        if lead:
            tokens.append(logits.argmax(dim=-1, keepdim=True))
    return found


def compared(logits: Sequence[Tensor], others: Sequence[Tensor]) -> tuple[float, bool]:
    """The largest difference of logits (B, V) from others over all steps, relative to their norm;
    and whether it is within `TOLERANCE` and the greedy choices are equal or tied."""
    error, agrees = 0.0, True
    for mine, theirs in zip(logits, others, strict=True):
        error = max(error, float((mine - theirs).norm() / theirs.norm()))
        chosen = theirs.gather(1, mine.argmax(dim=1, keepdim=True))
        behind = theirs.amax(dim=1, keepdim=True) - chosen
        agrees &= bool((behind <= TOLERANCE * theirs.std(dim=1, keepdim=True)).all())
    return error, agrees and error <= TOLERANCE


def _slope(rows: Sequence[dict[str, Any]], system: str) -> float | None:
    """Microseconds per token held, by least squares; None for a single context."""
    own = labels(system).items()
    mine = [row for row in rows if own <= row.items() and row.get("median_ms") is not None]
    if len(mine) < 2:
        return None
    x, y = [row["context"] for row in mine], [row["median_ms"] * 1e3 for row in mine]
    return statistics.linear_regression(x, y).slope
