"""Decode steps at growing contexts: the slope of their time is the cost of the cache."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvkeep.errors import UnsupportedError
from kvkeep.hf.quantised import quantise
from kvkeep.host.progress import Progress, Work, silent
from kvkeep.host.registry import require_host
from kvkeep.spec import parse_specs
from kvkeep_lab.bench.decode_loop import DYNAMIC, bytes_per_token
from kvkeep_lab.bench.device import Limits, bandwidth, because, device_named, with_values
from kvkeep_lab.bench.random_model import RANDOM, model_named
from kvkeep_lab.bench.record import result
from kvkeep_lab.bench.systems import (
    COMPILED,
    EAGER,
    FUSED,
    GRAPH,
    LITGPT,
    LLAMA_CPP,
    OTHERS,
    PLAIN,
    SPEC,
    STEPS_AHEAD,
    WAYS,
    Feed,
    Systems,
    labels,
)
from kvkeep_lab.bench.text import tokens_of_text
from kvkeep_lab.bench.timing import interleaved, spread, timer_for
from kvkeep_lab.checks import require_known

if TYPE_CHECKING:  # LitGPT may not be installed
    from kvkeep_lab.bench.litgpt_systems import LitGPTSystems

TOLERANCE = 0.1
"""Largest difference from DynamicCache's logits, relative to their norm, that different rounding to
bfloat16 can explain; also the largest difference of tied logits, in standard deviations."""

STEPS_COMPARED = 6  # enough that a CUDA graph replays the last ones


def run(
    model: str = "smollm2-135m",
    *,
    host: str = "transformers",
    device: str | None = None,
    dtype: str = "bfloat16",
    weights: str | None = None,
    contexts: Sequence[int] | None = None,
    specs: Sequence[str] = (SPEC,),
    ways: Sequence[str] | None = None,
    against: Sequence[str] | None = None,
    turns: int = 10,
    burst: int = 4,
    seconds: float | None = None,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Time single-token steps of a model over contexts of real text, with one row.

    All systems have the same weights and hold the same tokens, and are measured in turn.

    Args:
        model: a name from `kvkeep models`, a directory, or a hub name; or "random-1b", random
            weights in the shape of Llama 3.2 1B, whose caches get random content too.
        host: the library that runs the model: "transformers", or "litgpt", with copies of the same
            weights (a Llama). There `ways` are "default" and "eager", and `against` is "litgpt",
            LitGPT's own cache, which then takes the place of hf-dynamic.
        device: device to measure on; None: CUDA if available.
        dtype: dtype of weights and cache.
        weights: "int8" or "int4" to quantise the weights of linear layers by torchao, and
            llama.cpp's to Q8_0 or Q4_K_M; on the CPU.
        contexts: tokens held at the start of the steps; a slope needs at least two. None: 128, 2048
            and 7936, for a random model 2048, 8192, 32768 and 131072.
        specs: cache specs of kvkeep; each is a system.
        ways: how kvkeep's steps run: "default" (as `attach(model)` makes them: "kvkeep"), "eager"
            (without kvkeep's linear layers: "kvkeep-linears"), "compile" ("kvkeep+compile"),
            "graph" (with fixed storage, in a CUDA graph: "kvkeep+graph") and "compiled" (in a CUDA
            graph too). None: "default" and "compile" on the CPU, otherwise "default", "graph" and
            "compiled".
        against: "hf-dynamic", "hf-static" (compiled, which takes minutes), and "llama.cpp" (needs
            llama-cpp-python). None: the first on the CPU, otherwise the first two.
        turns, burst: each system runs `turns` + 1 times `burst` steps; the first burst is not
            counted.
        seconds: time limit; cases that have not started by then are skipped.

    Returns:
        `rows` (`system`, `spec` of kvkeep's, `context`, `median_ms`, `spread_ms`; if hf-dynamic is
        measured too, `error`, the largest difference from its logits over a few greedy steps,
        relative to their norm, and `agrees`, whether that is within `tolerance` and the greedy
        tokens are the same or tied; `skipped`, the reason why a case was not measured),
        `slope_us_per_token` of each
        system by least squares, and `bandwidth_floor_us_per_token`: one token's bytes divided by
        the bandwidth measured in this run.

    Raises:
        SpecError: a system or a spec does not exist.
        ModelError: the model, dtype or device does not exist here.
        UnsupportedError: llama.cpp is not installed, or cannot run this model.
    """
    place = device_named(device)
    contexts = contexts or ((2048, 8192, 32768, 131072) if model in RANDOM else (128, 2048, 7936))
    require_host(host)
    ways, against = _chosen(host, place, ways, against)
    for spec in specs:
        parse_specs(spec)
    _require_tokens(model, host, against)
    if weights is not None and host == LITGPT:
        raise UnsupportedError("weights are quantised with transformers only; leave out litgpt")
    limits = Limits(place, seconds)
    loaded, tokenizer = model_named(model, dtype, place)
    table = _Table(limits, against, turns, burst)
    rates, work = [bandwidth(place)], Work(progress, 2 * sum(contexts))
    with TemporaryDirectory() as directory:
        systems = _prepared(loaded, host, weights, specs, ways, against, Path(directory))
        for context in contexts:
            work.stage(f"{context} tokens", context)
            ids = None
            if tokenizer is not None:
                ids = tokens_of_text(tokenizer, context + 1).to(place)
            table.prepare(systems, context, ids)
        work.stage("steps", sum(contexts))
        table.measure(work)
    if table.alive:
        rates.append(bandwidth(place))
    rate = statistics.median(rate for _, rate in rates)
    found = with_values(table.rows)
    return result(
        "decode",
        found,
        model=model,
        dtype=dtype,
        weights=weights,
        host=host,
        tolerance=TOLERANCE,
        slope_us_per_token={name: _slope(found, name) for name in systems.names},
        bandwidth_floor_us_per_token=bytes_per_token(loaded) / rate / 1e3,
        **{rates[0][0]: rate},
    )


def _chosen(
    host: str, place: torch.device, ways: Sequence[str] | None, against: Sequence[str] | None
) -> tuple[Sequence[str], Sequence[str]]:
    """The ways and the other systems to measure, with the defaults of a host and a device."""
    on_cpu = place.type == "cpu"
    known: tuple[Sequence[str], Sequence[str]] = WAYS, OTHERS
    default: tuple[Sequence[str], Sequence[str]]
    if host == LITGPT:
        known = (PLAIN, EAGER), (LITGPT,)
        default = known if on_cpu else ((PLAIN,), (LITGPT,))
    elif on_cpu:
        default = (PLAIN, FUSED), (DYNAMIC,)
    else:
        default = (PLAIN, GRAPH, COMPILED), OTHERS[:2]
    ways, against = ways or default[0], default[1] if against is None else against
    require_known("system", against, known[1])
    require_known("way", ways, known[0])
    return ways, against


def _require_tokens(model: str, host: str, against: Sequence[str]) -> None:
    """Raise UnsupportedError if a random model is measured with systems that read a prompt."""
    reading = [name for name in (host, *against) if name in (LITGPT, LLAMA_CPP)]
    if model in RANDOM and reading:
        raise UnsupportedError(
            f"{reading[0]} needs a prompt, but {model} has no tokenizer; leave out one of them"
        )


def _prepared(
    model: Any,
    host: str,
    weights: str | None,
    specs: Sequence[str],
    ways: Sequence[str],
    against: Sequence[str],
    directory: Path,
) -> Systems | LitGPTSystems:
    """The systems to measure, with the weights of a model, which are quantised first."""
    if LLAMA_CPP in against:
        from kvkeep_lab.bench import llama_cpp  # noqa: PLC0415 (it needs packages that may be missing)

        llama_cpp.require(model)
        if weights is not None:
            llama_cpp.write_quantised(model, weights, directory)
    if weights is not None:
        quantise(model, weights)
    if host == LITGPT:
        litgpt_systems = import_module("kvkeep_lab.bench.litgpt_systems")
        found: LitGPTSystems = litgpt_systems.LitGPTSystems(model, specs, ways, against)
        return found
    return Systems(model, specs, ways, against, directory)


class _Table:
    """Collects the rows."""

    def __init__(self, limits: Limits, against: Sequence[str], turns: int, burst: int) -> None:
        self.limits, self.against, self.turns, self.burst = limits, against, turns, burst
        self.rows: list[dict[str, Any]] = []
        self.alive = True
        self._steps: dict[tuple[str, int], Callable[[], object]] = {}
        self._by_step: dict[tuple[str, int], dict[str, Any]] = {}

    def prepare(self, systems: Systems | LitGPTSystems, context: int, ids: Tensor | None) -> None:
        """Add a row for each system at a context, and prepare its steps if it can run."""
        systems.hold(context, ids, context + (self.turns + 1) * self.burst + STEPS_AHEAD)
        token, tokens = systems.token, [systems.token]
        feeds: dict[str, Feed] = {}
        logits: dict[str, list[Tensor]] = {}
        for name in systems.names:
            row = self._by_step[name, context] = _row(name, context)
            self.rows.append(row)
            if self._allows(row, systems.bytes_of(context)):
                with self._failing(row):
                    feeds[name] = systems.feed(name)
        for name in sorted(
            feeds, key=lambda name: name != systems.lead
        ):  # first: it picks the tokens
            row = self._by_step[name, context]
            if self._allows(row, seconds=systems.seconds_of(name)):
                with self._failing(row):
                    logits[name] = followed(feeds[name], tokens, lead=name == systems.lead)
                    self._steps[name, context] = _step(feeds[name], token)
        for name, mine in logits.items():
            if mine and systems.lead in logits:
                row = self._by_step[name, context]
                row["error"], row["agrees"] = compared(mine, logits[systems.lead])

    def measure(self, work: Work) -> None:
        """Time all steps. Contexts are interleaved too, so that drift does not look like a
        slope."""
        steps = {key: self._steps[key] for key in self._by_step if key in self._steps}
        timed: dict[tuple[str, int], list[float]] = {}
        with self._failing(*(self._by_step[key] for key in steps)):
            timer = timer_for(self.limits.device)
            timed = interleaved(
                steps, turns=self.turns, burst=self.burst, timer=timer, tick=work.part
            )
        for key, seconds in timed.items():
            self._by_step[key]["median_ms"] = statistics.median(seconds) * 1e3
            self._by_step[key]["spread_ms"] = spread(seconds) * 1e3

    def _allows(self, row: dict[str, Any], needed: int = 0, seconds: float = 0.0) -> bool:
        """Whether to measure a row; if not, the row gets the reason."""
        failed = None if self.alive else "the device has failed"
        row["skipped"] = failed or self.limits.refuse(needed, seconds)
        return row["skipped"] is None

    @contextmanager
    def _failing(self, *rows: dict[str, Any]) -> Iterator[None]:
        """Record an error in the rows as the reason why they are skipped, and check whether the
        device still works. On the CPU only missing packages are treated so; other errors raise."""
        try:
            yield
        except Exception as error:
            if self.limits.device.type == "cpu" and not isinstance(error, ImportError):
                raise
            for row in rows:
                row["skipped"] = because(error)
            try:
                torch.zeros(1, device=self.limits.device).item()
            except Exception:
                self.alive = False


def _row(system: str, context: int) -> dict[str, Any]:
    numbers = ("median_ms", "spread_ms", "agrees", "error", "skipped")
    return labels(system) | {"context": context} | dict.fromkeys(numbers)


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


def _step(feed: Feed, token: Tensor) -> Callable[[], object]:
    return lambda: feed(token)


def _slope(rows: Sequence[dict[str, Any]], system: str) -> float | None:
    """Microseconds per token held, by least squares; None for a single context."""
    own = labels(system).items()
    mine = [row for row in rows if own <= row.items() and row.get("median_ms") is not None]
    if len(mine) < 2:
        return None
    x, y = [row["context"] for row in mine], [row["median_ms"] * 1e3 for row in mine]
    return statistics.linear_regression(x, y).slope
