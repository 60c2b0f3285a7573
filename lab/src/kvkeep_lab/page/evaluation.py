"""The page of an evaluation: its table, and curves of each spec's loss over the bytes it holds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from kvkeep_lab.evals import tradeoff
from kvkeep_lab.evals.run import BASELINE
from kvkeep_lab.page.document import document


class Measure(NamedTuple):
    """A column of the table, which a chart can show too."""

    key: str
    heading: str
    label: str  # of a chart's axis
    scale: str  # log, or share: from 0 to 1
    best: str  # low or high


_LOSSES = (
    Measure("kl", "KL", "KL to the full cache, nats per token", "log", "low"),
    Measure("perplexity", "perplexity", "perplexity of the continuation", "log", "low"),
    Measure("perplexity_ratio", "ratio", "perplexity divided by the full cache's", "log", "low"),
    Measure("top1", "top1", "share of tokens with the full cache's prediction", "share", "high"),
)
_SPEED = Measure("tokens_per_s", "tokens/s", "tokens per second", "log", "high")


def evaluation(title: str, rows: Sequence[tradeoff.Row], runs: Sequence[Mapping[str, Any]]) -> str:
    """The page, as one text of HTML.

    Args:
        rows: of one or more runs, see `kvkeep_lab.evals.tradeoff.rows_of`.
        runs: what `kvkeep_lab.evals.run.run` returned, for its settings.
    """
    tasks = list(dict.fromkeys(task for row in rows for task in row.get("tasks") or ()))
    means = tradeoff.losses(rows)
    measures = list(_LOSSES)
    if len(tasks) > 1:
        measures.append(Measure("accuracy", "tasks", means["accuracy"], "share", "high"))
    measures += [Measure(f"task {t}", t, f"accuracy of {t}", "share", "high") for t in tasks]
    measures.append(_SPEED)
    # One task is its own mean.
    shown = [f"task {tasks[0]}" if key == "accuracy" and len(tasks) == 1 else key for key in means]
    full = {tradeoff.group(row): row["bytes"] for row in rows if row["spec"] == BASELINE}
    data = {
        "title": title,
        "measures": [one._asdict() for one in measures],
        "shown": shown,
        "rows": [_row(row, measures, full[tradeoff.group(row)]) for row in rows],
        "runs": [_described(run) for run in runs],
    }
    return document("eval.html", title, data)


def _row(row: tradeoff.Row, measures: Sequence[Measure], full: int) -> dict[str, Any]:
    spec = row["spec"]
    found = {"spec": spec, "name": tradeoff.short(spec), "family": tradeoff.family(spec)}
    found |= {"group": tradeoff.group(row), "series": tradeoff.series(row)}
    found |= {"model": row.get("model", ""), "context": row["context"], "bytes": row["bytes"]}
    figures = {one.key: _figure(row, one.key) for one in measures}
    return {**found, "full_bytes": full, "figures": figures}


def _figure(row: tradeoff.Row, key: str) -> tuple[float, ...] | None:
    """A figure with its interval, or alone where none is known; None if it was not measured or is
    no finite number."""
    kind, _, task = key.partition(" ")
    if task:
        found = (row.get("tasks") or {}).get(task)
        one = tradeoff.Figure(found["accuracy"], found["low"], found["high"]) if found else None
    else:
        one = tradeoff.figure(row, kind)
    if one is None or not all(map(math.isfinite, one)):
        return None
    return one if one.low < one.high else (one.value,)


def _described(run: Mapping[str, Any]) -> dict[str, Any]:
    names = ("model", "adapter", "dtype")
    settings = [
        (name.replace("_", " "), f"{value:,}" if type(value) is int else str(value))
        for name, value in _scalars(run)
        if name not in (*names, "evaluation")
    ]
    title = ", ".join(str(run[name]) for name in names if run.get(name))
    return {"title": title, "settings": settings}


def _scalars(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The settings that a run was given, and its machine."""
    for name, value in values.items():
        if name == "environment":
            yield from _scalars(value)
        elif isinstance(value, bool):
            yield name, "yes" if value else "no"
        elif isinstance(value, int | float | str) and value not in ("", "none"):
            yield name, value
