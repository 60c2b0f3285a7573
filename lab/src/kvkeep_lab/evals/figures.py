"""The figures of a row for the answers of tasks."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from kvkeep_lab.evals.answers import Answer
from kvkeep_lab.evals.intervals import of_scores
from kvkeep_lab.evals.prompts import Prompt
from kvkeep_lab.evals.samples import Record


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


def in_figures(
    prompts: Mapping[str, Sequence[Prompt]], answers: Mapping[str, Sequence[Answer]]
) -> dict[str, Any]:
    """`tasks`, and `retrieval` and `retrieval_by_depth` of `needle`, from the answer to each
    prompt."""
    figures = {}
    for task, some in answers.items():
        scores = [answer.score for answer in some]
        accuracy = statistics.fmean(scores)
        low, high = of_scores(scores)
        figures[task] = {"accuracy": accuracy, "low": low, "high": high, "samples": len(scores)}
    by_depth: dict[str, list[float]] = {}
    for prompt, answer in zip(prompts.get("needle", ()), answers.get("needle", ()), strict=True):
        by_depth.setdefault(str(prompt.depth), []).append(answer.score)
    shares = {depth: statistics.fmean(some) for depth, some in by_depth.items()}
    return {
        "retrieval": figures["needle"]["accuracy"] if by_depth else None,
        "retrieval_by_depth": shares or None,
        "tasks": figures,
    }
