"""Compares cache specs: the quality that each loses, and the memory that it saves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvkeep.errors import ShapeError, SpecError, UnsupportedError
from kvkeep.host import Host, ModelCache, host_of, load_model
from kvkeep.host.compress import compress, compresses
from kvkeep.host.progress import Progress, Work, silent
from kvkeep.spec import CacheSpec, PerType, parse_specs
from kvkeep.store.beginning import begin, settle
from kvkeep_lab.bench.text import windows_of_text
from kvkeep_lab.bench.timing import medians_of
from kvkeep_lab.evals.answers import Answer, answered
from kvkeep_lab.evals.figures import Measured
from kvkeep_lab.evals.forward import fill, follow, reads_exactly, require_positions
from kvkeep_lab.evals.options import EvalOptions
from kvkeep_lab.evals.prompts import Prompt
from kvkeep_lab.evals.samples import Record, recorder, row_of
from kvkeep_lab.evals.tasks import chosen, prompts

if TYPE_CHECKING:
    from kvkeep_lab.evals.kvpress import Kvpress
    from kvkeep_lab.evals.llama_cpp import LlamaCpp

BASELINE = "keep_all"
_Spec = CacheSpec | PerType

_TURNS, _BURST = 4, 3
TIMED_STEPS = (_TURNS + 1) * _BURST
"""Steps that are run to time a cache."""


def run(
    model: str | None = "smollm2-135m",
    *,
    adapter: str | None = None,
    dtype: str = "float32",
    context: int | Sequence[int] = 2000,
    specs: Sequence[str] = (BASELINE,),
    samples_file: Path | None = None,
    overwrite: bool = False,
    progress: Progress = silent,
    **options: Any,
) -> dict[str, Any]:
    """Load a model by name, with or without an adapter, and `evaluate` it; see
    `kvkeep.host.load_model`.

    Args:
        context, specs, progress, options: see `evaluate`.
        samples_file: gets a line of JSON for each answer when it is known; see
            `kvkeep_lab.evals.samples`.
        overwrite: replace a `samples_file` that exists.

    Raises:
        SpecError: a spec or a task does not exist, or no spec is given; raised before the model is
            loaded.
        ModelError: the model or dtype does not exist or cannot be loaded.
        SamplesError: the samples' file exists or cannot be written.
    """
    _parsed(specs)
    chosen(options.get("tasks", ()))
    about = {"model": model, "adapter": adapter, "dtype": dtype}
    contexts = [context] if isinstance(context, int) else context
    record = recorder(samples_file, about, overwrite=overwrite)
    loaded, tokenizer = load_model(model, dtype, progress=progress, adapter=adapter)
    options |= {"contexts": contexts, "record": record, "progress": progress}
    found = evaluate(loaded, tokenizer, specs, **options)
    return {"evaluation": "quality", **about, **found}


@torch.inference_mode()
def evaluate(
    model: Any,
    tokenizer: Any,
    specs: Sequence[str],
    *,
    record: Record = lambda row: None,
    against: Kvpress | LlamaCpp | None = None,
    read_once: bool = False,
    progress: Progress = silent,
    **options: Any,
) -> dict[str, Any]:
    """Compare cache specs with the full cache, on a loaded model that is not attached.

    With each spec the model is fed the context, then the true continuation one token at a time, so
    that the cache evicts and encodes as it does in generation.

    Args:
        specs: compared with `keep_all`, which is always measured.
        record: called with a row for each answer; see `kvkeep_lab.evals.samples`.
        against: also compare these presses, where the question comes late for all; or llama.cpp,
            which answers no tasks.
        read_once: let the caches that `reads_exactly` begin with the full cache's slots, which
            takes less time than feeding them the context. Not if it comes in chunks, or if the full
            cache cannot be truncated (sliding windows).
        progress: called during the evaluation; see `Progress`.
        options: see `kvkeep_lab.evals.options.EvalOptions`.

    Returns:
        `rows`, one for each context and spec, and `baseline`, one for each context: `spec`,
        `context`, `perplexity` of the continuation and `perplexity_ratio` to the full cache's, `kl`
        (mean KL(full || spec) per token, nats), `top1` (agreement with the full cache's likeliest
        token), `retrieval` (share of hidden numbers found; None without `needle`), `bytes` and
        `allocated` of one row after the context, `tokens_per_s` of one row's steps from there,
        `retrieval_by_depth` (percent of the text -> share), `kl_95` (the 95 % interval of `kl`),
        and `tasks` (name -> `accuracy`, its 95 % interval `low` to `high`, and `samples`). With
        `against` also such rows for its presses or types, with `versions`, and for presses with
        `kept` (share of keys and values that are attended to) or the reason in `failed`. `skipped`
        has the `context`, `task` and `reason` of each task that was skipped.

    Raises:
        SpecError: a spec or a task does not exist, a spec does not fit the model, or none is given.
        ShapeError: the text is too short, or the model's context, or no context has room for any
            of the tasks.
        CapacityError: a spec's fixed slots cannot hold the tokens.
        UnsupportedError: kvpress cannot run the model, or its context would come in chunks.
    """
    asked, parsed, host = EvalOptions(**options), _parsed(specs), host_of(model)
    distinct = {parse_specs(BASELINE): BASELINE}  # each with its first name
    for name, spec in parsed.items():
        distinct.setdefault(spec, name)
    if against is not None:
        asked = replace(asked, late_question=asked.late_question or against.late)
        if against.late and asked.chunk is not None:
            raise UnsupportedError(
                f"chunks of {asked.chunk} tokens, but kvpress compresses a context that is fed at "
                "once; leave out --chunk"
            )
        against.require(model)
    for context in asked.contexts:
        require_positions(host, context, _steps(asked))
    # Cut every text and build every cache once, so that errors come before any computation.
    texts = [
        windows_of_text(tokenizer, asked.windows, context + asked.continuation, asked.text_file)
        for context in asked.contexts
    ]
    each, skipped = _prompts(asked, tokenizer, texts)
    for spec in distinct:
        most = max(asked.contexts)
        _cache(host, spec, most, _steps(asked)).admit(most + _steps(asked))
    rows, baseline, others = [], [], list[dict[str, Any]]()
    reads = sum(asked.windows + sum(map(len, some.values())) for some in each)
    work = Work(progress, reads * len(distinct))
    with host.attach(BASELINE):
        for context, text, some in zip(asked.contexts, texts, each, strict=True):
            measured = Measured(model, tokenizer, text, context, some, record)
            read = _Context(host, measured, asked, work, read_once and asked.chunk is None)
            found = read.rows(distinct)
            baseline.append(found[parse_specs(BASELINE)])
            rows += [{**found[parsed[spec]], "spec": spec} for spec in specs]
            if against is not None:
                others += against.rows(measured, progress)
    settings = ("continuation", "windows", "chunk", "late_question", "samples")
    told = {name: getattr(asked, name) for name in settings}
    compared = {} if against is None else {"against": others}
    return {**told, "skipped": skipped, "rows": rows, "baseline": baseline, **compared}


def _steps(asked: EvalOptions) -> int:
    """The most tokens that are fed after a context."""
    return max(asked.continuation, TIMED_STEPS)


def _prompts(
    asked: EvalOptions, tokenizer: Any, texts: Sequence[Tensor]
) -> tuple[list[dict[str, list[Prompt]]], list[dict[str, Any]]]:
    """Each context's prompts by task, and the tasks that a context has no room for.

    Raises:
        ShapeError: no context has room for any task.
    """
    found, skipped = list[dict[str, list[Prompt]]](), list[dict[str, Any]]()
    for context, text in zip(asked.contexts, texts, strict=True):
        found.append({})
        for task in chosen(asked.tasks):
            try:
                found[-1][task] = [
                    prompt
                    for seed, window in enumerate(text)
                    for prompt in prompts(task, tokenizer, window, context, asked.samples, seed)
                ]
            except ShapeError as error:
                skipped.append({"context": context, "task": task, "reason": str(error)})
    if skipped and not any(found):
        raise ShapeError(skipped[0]["reason"])
    return found, skipped


class _Context:
    """All specs at one context."""

    def __init__(
        self, host: Host, asked: Measured, how: EvalOptions, work: Work, read_once: bool
    ) -> None:
        self.host, self.asked, self.work, self.read_once = host, asked, work, read_once
        self.context, self.chunk, self.late = asked.context, how.chunk, how.late_question
        text = asked.text.to(host.device)
        self.past, self.ids = text[:, : asked.context], text[:, asked.context :]
        self._held: dict[_Spec, ModelCache] = {}  # one row of each after the context, for timing
        self._full: tuple[ModelCache, Tensor] | None = None  # the full cache and its logits there

    def rows(self, specs: Mapping[_Spec, str]) -> dict[_Spec, dict[str, Any]]:
        """Each spec's figures; the first is the full cache, the baseline of the comparison. Samples
        are recorded under the specs' names."""
        found = {spec: self._row(spec, name) for spec, name in specs.items()}
        for spec, speed in self._speed().items():
            found[spec]["tokens_per_s"] = speed
        return found

    def _row(self, spec: _Spec, name: str) -> dict[str, Any]:
        answers = self._answers(spec, name)
        rows, length = self.ids.shape
        self.work.stage(f"{spec}, {self.context} tokens: text", rows)
        cache = _cache(self.host, spec, self.context, length)
        first = self._read(cache)
        if compresses(cache):
            compress(self.host, cache, self.past)
        held = {"bytes": cache.live_bytes // rows, "allocated": cache.nbytes // rows}
        self._held[spec] = deepcopy(cache)
        self._held[spec].select([0])
        logits = follow(self.host, cache, first, self.ids)
        full = self.asked.full
        if not full:
            full += [x.cpu() for x in logits]
            logits = iter(full)
            if self.read_once and cache.rollback_limit >= length - 1:
                cache.crop(1 - length)
                self._full = cache, first
        return self.asked.row(name, logits, answers, **held)

    def _read(self, cache: ModelCache) -> Tensor:
        """Feed the context to a cache, unless it can begin with the full cache's slots. Returns the
        logits (B, V) after it."""
        if self._full is None or not reads_exactly(cache):
            return fill(self.host, cache, self.past, self.chunk)
        begin(cache, self._full[0])
        settle(cache)
        return self._full[1]

    def _answers(self, spec: _Spec, name: str) -> dict[str, list[Answer]]:
        answers: dict[str, list[Answer]] = {}
        for task, some in self.asked.prompts.items():
            self.work.stage(f"{spec}, {self.context} tokens: {task}", len(some))
            answers[task] = []
            for sample, prompt in enumerate(some):
                cache = _cache(self.host, spec, self.context, prompt.steps)
                given = (self.host.model, self.asked.tokenizer, cache, prompt, self.chunk)
                answer = answered(*given, late=self.late)
                self.asked.record(row_of(name, self.context, task, sample, prompt, answer))
                answers[task].append(answer)
                self.work.tick(1)
        return answers

    def _speed(self) -> dict[_Spec, float]:
        """Tokens per second of single steps after the context, with the specs interleaved."""
        self.work.stage("timing", 0)
        token = self.ids[:1, :1]
        steps = {s: partial(fill, self.host, cache, token) for s, cache in self._held.items()}
        medians = medians_of(steps, turns=_TURNS, burst=_BURST)
        return {spec: 1 / seconds for spec, seconds in medians.items()}


def _cache(host: Host, spec: _Spec, context: int, more: int) -> ModelCache:
    """An empty cache with room for the context and the tokens fed after it."""
    return host.new_cache(spec, capacity=context + max(more, TIMED_STEPS))


def _parsed(specs: Sequence[str]) -> dict[str, _Spec]:
    """The specs by their texts.

    Raises:
        SpecError: one does not exist, or none is given.
    """
    if not specs:
        raise SpecError(f"no spec to evaluate; give one, such as {BASELINE}")
    return {spec: parse_specs(spec) for spec in specs}
