"""The figures of a row for the scores of tasks."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from kvkeep.evals.intervals import of_share
from kvkeep.evals.prompts import Prompt


def in_figures(
    prompts: Mapping[str, Sequence[Prompt]], scores: Mapping[str, Sequence[float]]
) -> dict[str, Any]:
    """`tasks`, and `retrieval` and `retrieval_by_depth` of `needle`, from the score of each
    prompt."""
    figures = {}
    for task, some in scores.items():
        accuracy = statistics.fmean(some)
        low, high = of_share(accuracy, len(some))
        figures[task] = {"accuracy": accuracy, "low": low, "high": high, "samples": len(some)}
    by_depth: dict[str, list[float]] = {}
    for prompt, score in zip(prompts.get("needle", ()), scores.get("needle", ()), strict=True):
        by_depth.setdefault(str(prompt.depth), []).append(score)
    shares = {depth: statistics.fmean(some) for depth, some in by_depth.items()}
    return {
        "retrieval": figures["needle"]["accuracy"] if by_depth else None,
        "retrieval_by_depth": shares or None,
        "tasks": figures,
    }
