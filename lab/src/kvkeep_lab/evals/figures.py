"""The figures of a row for the answers of tasks."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor

from kvkeep_lab.evals.answers import Answer
from kvkeep_lab.evals.intervals import of_scores
from kvkeep_lab.evals.prompts import Prompt
from kvkeep_lab.evals.quality import compare
from kvkeep_lab.evals.samples import Record

Answers = Mapping[str, Sequence[Answer]]
"""The answer to each prompt of each task."""


@dataclass(frozen=True)
class Measured:
    """A text on which systems are compared at one context.

    Args:
        text: token ids (windows, context + N), on the CPU.
        prompts: of each task.
        record: called with a row for each answer; see `kvkeep_lab.evals.samples`.
        full: the full cache's N predictions (windows, V), as soon as they are known.
    """

    model: Any
    tokenizer: Any
    text: Tensor
    context: int
    prompts: Mapping[str, Sequence[Prompt]]
    record: Record
    full: list[Tensor] = field(default_factory=list)

    @cached_property
    def full_perplexity(self) -> float:
        """The full cache's perplexity."""
        return compare(self.full, self.full, self.text[:, self.context :]).perplexity

    def row(
        self, spec: str, logits: Iterable[Tensor], answers: Answers, **held: Any
    ) -> dict[str, Any]:
        """A system's row.

        Args:
            logits: its N predictions (windows, V).
            answers: its answers to the prompts of each task.
            held: further entries, such as `bytes`.
        """
        mine = compare(logits, self.full, self.text[:, self.context :])
        ratio = mine.perplexity / self.full_perplexity
        figures = {**vars(mine), "perplexity_ratio": ratio, **held}
        return {"spec": spec, "context": self.context} | figures | _of_tasks(self.prompts, answers)


def _of_tasks(prompts: Mapping[str, Sequence[Prompt]], answers: Answers) -> dict[str, Any]:
    """`tasks`, and `retrieval` and `retrieval_by_depth` of `needle`, from the answer to each
    prompt."""
    tasks, depths = {}, dict[str, list[float]]()
    for task, some in answers.items():
        scores = [answer.score for answer in some]
        low, high = of_scores(scores)
        mean = {"accuracy": statistics.fmean(scores), "low": low, "high": high}
        tasks[task] = {**mean, "samples": len(scores)}
    for prompt, answer in zip(prompts.get("needle", ()), answers.get("needle", ()), strict=False):
        depths.setdefault(str(prompt.depth), []).append(answer.score)
    return {
        "retrieval": tasks["needle"]["accuracy"] if depths else None,
        "retrieval_by_depth": {at: statistics.fmean(x) for at, x in depths.items()} or None,
        "tasks": tasks,
    }
