"""The loss of specs over the bytes they hold: the rows, figures and intervals that a drawing of an
evaluation shows."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kvkeep_lab.evals.intervals import of_share

Row = Mapping[str, Any]

OTHERS = ("kvpress", "llama.cpp")
"""What is compared with kvkeep. Rows of these have their name and a space before their spec."""


class Figure(NamedTuple):
    """A figure and its 95 % interval, whose ends are the figure itself where none is known."""

    value: float
    low: float
    high: float


def rows_of(result: Mapping[str, Any], model: str = "") -> list[dict[str, Any]]:
    """The rows of an evaluation, and after them the rows of `OTHERS` that did not fail. At each
    context the full cache comes first, unless its spec is among them.

    Args:
        result: what `kvkeep_lab.evals.run.run` returned.
        model: a name that each row gets as its `model`, if not empty.

    Raises:
        LookupError, TypeError, AttributeError: it is not the result of an evaluation.
    """
    rows = []
    for full in result["baseline"]:
        mine = [row for row in result["rows"] if row["context"] == full["context"]]
        rows += mine if any(row["spec"] == full["spec"] for row in mine) else [full, *mine]
    rows += [row for row in result.get("against", []) if "failed" not in row]
    return [{**row, "model": model} if model else dict(row) for row in rows]


def losses(rows: Sequence[Row]) -> dict[str, str]:
    """The figures of a spec's loss, with their labels: the divergence, and the accuracy
    of tasks, or the perplexity where no task was tested."""
    tested = any(row.get("tasks") for row in rows)
    other = {"accuracy": "accuracy, mean of tasks"} if tested else {"perplexity": "perplexity"}
    return {"kl": "KL to the full cache, nats per token", **other}


def figure(row: Row, column: str) -> Figure | None:
    """A figure of a row; None if the row lacks it. `accuracy` is the mean of all its tasks."""
    tasks, value = (row.get("tasks") or {}).values(), row.get(column)
    if column == "accuracy" and tasks:
        value = sum(task["accuracy"] for task in tasks) / len(tasks)
        low, high = of_share(value, sum(task["samples"] for task in tasks))
    elif value is not None:
        low, high = row.get(f"{column}_95") or (value, value)
    else:
        return None
    return Figure(value, min(low, value), max(high, value))


def group(row: Row) -> str:
    """The model and context of a row. Only rows with the same can be compared."""
    return f"{row.get('model', '')} {row['context']:,} tokens".strip()


def series(row: Row) -> str:
    """The group of a row, which decides its colour, and which of `OTHERS` it is of."""
    other = row["spec"].partition(" ")[0]
    return f"{group(row)}, {other}" if other in OTHERS else group(row)


def short(spec: str) -> str:
    """A spec without the names of files, and without the name of one of `OTHERS` before it."""
    other, _, rest = spec.partition(" ")
    return re.sub(r",scorer=[^,+@)]*", "", rest if other in OTHERS else spec)


def family(spec: str) -> str:
    """A spec with `*` for its budget, equal for specs that differ in nothing else."""
    # The budget is the first option of the innermost policy.
    return re.sub(r"^((?:.*\()?\w+:)\d[\d.]*%?(?=[,)@+]|$)", r"\1*", spec)
