"""The model's answer to each prompt, in a file of JSON Lines."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from io import FileIO
from pathlib import Path
from typing import Any

from kvkeep.errors import KVKeepError
from kvkeep_lab.evals.answers import Answer
from kvkeep_lab.evals.prompts import Prompt

Record = Callable[[Mapping[str, Any]], None]
"""Called with the row of each answer, as soon as it is known."""


class SamplesError(KVKeepError, ValueError):
    """A file of samples cannot be written."""


def row_of(
    spec: str, context: int, task: str, sample: int, prompt: Prompt, answer: Answer
) -> dict[str, Any]:
    """An answer as a row.

    Args:
        sample: the prompt's number among those of the task at this context. In runs that ask for
            as many samples of the same texts, equal numbers are equal prompts for every spec, and
            for every model and adapter with the same tokenizer.
    """
    return {
        "spec": spec,
        "context": context,
        "task": task,
        "sample": sample,
        "seed": prompt.seed,
        "depth": prompt.depth,
        "tokens": prompt.ids.shape[1],
        "expected": list(prompt.answers),
        "generated": answer.text,
        "metric": prompt.metric.name,
        "score": answer.score,
    }


def recorder(file: Path | None, about: Mapping[str, Any], *, overwrite: bool = False) -> Record:
    """A function that appends rows to a file, each with the entries of `about`.

    The file is made with the first row, so a run that is refused leaves none, and replaces none.
    Each row is one write of a whole line, so a run that is interrupted leaves whole lines.

    Args:
        file: None: rows go nowhere.
        overwrite: replace a file that exists.

    Raises:
        SamplesError: the file exists or cannot be written.
    """
    if file is None:
        return lambda row: None
    _check(file, overwrite)
    mode = "w" if overwrite else "x"

    def record(row: Mapping[str, Any]) -> None:
        nonlocal mode
        try:
            with FileIO(file, mode) as out:
                line, end = json.dumps({**about, **row}).encode() + b"\n", out.tell()
                if out.write(line) != len(line):
                    out.truncate(end)  # nothing is left of the line
                    raise OSError("no space is left")
        except OSError as error:
            raise SamplesError(
                f"cannot write samples to {file}: {error}; give another name, or make room"
            ) from error
        mode = "a"

    return record


def _check(file: Path, overwrite: bool) -> None:
    if not file.parent.is_dir():
        raise SamplesError(f"no samples in {file}: there is no directory {file.parent}; make it")
    if not os.access(file.parent, os.W_OK):
        raise SamplesError(f"no samples in {file}: {file.parent} cannot be written to; use another")
    if file.is_dir() or (file.exists() and not overwrite):
        raise SamplesError(f"{file} exists; give another name, or --overwrite to replace the file")
