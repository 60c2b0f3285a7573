"""Recorded results: files with the `--json` output of a benchmark."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kvkeep.environment import environment
from kvkeep.errors import KVKeepError


class RecordError(KVKeepError, ValueError):
    """A file that is not the recorded result of a benchmark."""


def result(benchmark: str, rows: Sequence[Mapping[str, Any]], **about: Any) -> dict[str, Any]:
    """A benchmark's result: its rows, the machine, and in `about` the model or `shape`, the dtype,
    and its options."""
    return {"benchmark": benchmark, **about, "environment": environment(), "rows": rows}


class Record(NamedTuple):
    """The result of one benchmark.

    Args:
        title: the benchmark, and the model or shape that was measured.
        machine: the processor or accelerator, and the version of torch.
        rows: of equal keys, one for each system and length.
    """

    path: Path
    title: str
    machine: str
    rows: list[dict[str, Any]]


def read(path: Path) -> Record:
    """Read a recorded result; the JSON object may follow other lines.

    Raises:
        RecordError: the file cannot be read, or holds something else.
    """
    try:
        result = json.loads(path.read_text().strip().splitlines()[-1])
        rows, machine = result["rows"], result["environment"]
        if not rows:
            raise ValueError("it has no rows")
        what = ", ".join(f"{k} {v}" for k, v in result.get("shape", {}).items())
        if not what:
            what = f"{result['model']}, {result['dtype']}"
        accelerated = machine["accelerator"] != "none"
        processor = f"{machine['cpu']} ({machine['instructions']})"
        return Record(
            path,
            f"{result['benchmark']}: {what}",
            f"{machine['accelerator'] if accelerated else processor}, torch {machine['torch']}",
            [dict(row) for row in rows],
        )
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise RecordError(
            f"{path} is no recorded benchmark ({type(error).__name__}: {error}); give a file with "
            "the last line of a `kvkeep bench ... --json`"
        ) from error
