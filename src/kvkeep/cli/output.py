"""Shared by the commands: consoles, progress, errors, lists of numbers, and the JSON line."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

from kvkeep.cli.table import tables
from kvkeep.errors import KVKeepError

DEFAULT_MODEL = "smollm2-135m"

ModelName = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="A name from `kvkeep models`, a directory, a GGUF file, or a hub name; "
        "default: smollm2-135m, or the adapter's base model.",
        show_default=False,
    ),
]
AdapterName = Annotated[
    str | None,
    typer.Option(
        "--adapter", help="An adapter's directory, e.g. one that `kvkeep finetune` wrote."
    ),
]
ModelDtype = Annotated[str, typer.Option("--dtype", help="auto, float32, bfloat16, float16.")]
Temperature = Annotated[float, typer.Option(min=0.0, help="Sampling temperature; 0 is greedy.")]
TopP = Annotated[float, typer.Option(min=0.0, max=1.0, help="Probability mass to sample from.")]
JsonFlag = Annotated[
    bool, typer.Option("--json", help="Print the result as one JSON object on the last line.")
]

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


@contextmanager
def reported() -> Iterator[None]:
    """Turn errors into one line on stderr. The exit code is 2 for kvkeep's own errors and 1 for any
    other; KVKEEP_TRACEBACK=1 shows the traceback of the latter."""
    try:
        yield
    except (KVKeepError, typer.BadParameter, typer.Exit) as error:
        if not isinstance(error, KVKeepError):
            raise
        _print_error(str(error))
        raise typer.Exit(2) from None
    except Exception as error:
        if os.environ.get("KVKEEP_TRACEBACK"):
            raise
        reason = " ".join(str(error).split())
        _print_error(f"{type(error).__name__}: {reason} (traceback: KVKEEP_TRACEBACK=1)")
        raise typer.Exit(1) from None


def _print_error(message: str) -> None:
    Console(stderr=True).print("error:", style="bold red", end=" ")
    typer.echo(message, err=True)


class Working:
    """Shows the current activity on stderr: as a spinner on a terminal, otherwise as a line for
    each change."""

    def __init__(self, doing: str) -> None:
        self._console = Console(stderr=True)
        self._status = self._console.status(doing)

    def __enter__(self) -> Working:
        self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __call__(self, doing: str) -> None:
        self._status.update(doing)
        if not self._console.is_terminal:
            self._console.print(f"{doing} ...", style="dim", highlight=False)

    def stop(self) -> None:
        """Remove the spinner, before other output."""
        self._status.stop()


class Advancing:
    """Shows the current activity and the share done on stderr: as a progress bar on a terminal,
    otherwise as a line for each change.

    Args:
        over: seconds over which speed is averaged to estimate the remaining time.
        shown: whether anything is shown.
    """

    def __init__(self, doing: str, over: float = 30.0, *, shown: bool = True) -> None:
        self._shown = shown
        self._console = Console(stderr=True)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeRemainingColumn(),
            console=self._console,
            speed_estimate_period=over,
            transient=True,
            disable=not (shown and self._console.is_terminal),
        )
        self._task = self._bar.add_task(doing, total=1.0)
        self._doing = doing

    def __enter__(self) -> Advancing:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def __call__(self, doing: str, share: float) -> None:
        self._bar.update(self._task, description=doing, completed=share)
        if self._shown and doing != self._doing and not self._console.is_terminal:
            self._console.print(f"{share:4.0%} {doing} ...", style="dim", highlight=False)
        self._doing = doing


def model_for(model: str | None, adapter: str | None) -> str | None:
    """The given model, or the default one; None means the base model of the adapter."""
    return model if model or adapter else DEFAULT_MODEL


def titled(model: str | None, adapter: str | None) -> str:
    """The names of a model and its adapter, for titles."""
    return " + ".join(name for name in (model, adapter) if name)


def size_in_bytes(text: str) -> int:
    """Parse a size such as 500MB or 2GiB.

    Raises:
        BadParameter: the text is not a size.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([a-zA-Z]*)", text.strip())
    if found is None or found[2].upper() not in _UNITS:
        raise typer.BadParameter(f"{text!r}: give a size such as 500MB, 2GB or 2GiB")
    return int(float(found[1]) * _UNITS[found[2].upper()])


def whole_numbers(text: str) -> list[int]:
    """Parse comma-separated whole numbers above 0.

    Raises:
        BadParameter: the text is anything else.
    """
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise typer.BadParameter(f"{text!r}: give whole numbers above 0, e.g. 256,1024")
    return [int(part) for part in parts]


def listed(text: str, separator: str) -> list[str]:
    """Split an option's text; empty parts are left out."""
    return [part.strip() for part in text.split(separator) if part.strip()]


def print_json(result: Mapping[str, Any]) -> None:
    """Print one JSON object on one line of stdout."""
    typer.echo(json.dumps(result))


def print_table(title: str, rows: Sequence[Mapping[str, Any]], *, stderr: bool = False) -> None:
    """Print rows with the same keys as a table: see `kvkeep.cli.table`."""
    console = Console(stderr=stderr)
    for index, table in enumerate(tables(title, rows, console.width)):
        if index:
            console.print()
        console.print(table)
