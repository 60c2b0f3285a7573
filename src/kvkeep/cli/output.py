"""Common options of commands, parsing of lists and sizes, and printing."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import Annotated, Any

import typer
from rich.console import Console

from kvkeep.cli.table import tables

DEFAULT_MODEL = "smollm2-135m"

JsonFlag = Annotated[
    bool, typer.Option("--json", help="Print the result as one JSON object on the last line.")
]

_UNITS = " KMGT"  # powers of 1000, or of 1024 with an "i"


def titled(model: str | None, adapter: str | None) -> str:
    """The names of a model and its adapter, for titles."""
    return " + ".join(name for name in (model, adapter) if name)


def size_in_bytes(text: str, option: str) -> int:
    """Parse an option's size such as 500MB, 2GiB or 1000000.

    Raises:
        BadParameter: the text is not a size.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT]?)(i?)B?", text.strip(), re.IGNORECASE)
    if found is None:
        raise typer.BadParameter(f"{option} {text!r}: give a size such as 500MB, 2GB or 2GiB")
    number, unit, binary = found.groups()
    return int(float(number) * (1024 if binary else 1000) ** _UNITS.index(unit.upper() or " "))


def whole_numbers(text: str, option: str, least: int = 1) -> list[int]:
    """Parse an option's comma-separated whole numbers of at least `least`.

    Raises:
        typer.BadParameter: a part is not a whole number, or too small.
    """
    found = [x for part in text.split(",") if (x := part.strip()).isdecimal() and int(x) >= least]
    if len(found) < text.count(",") + 1:
        raise typer.BadParameter(
            f"{option} {text!r}: give whole numbers of at least {least}, e.g. 256,1024"
        )
    return [int(x) for x in found]


def listed(text: str, separator: str) -> list[str]:
    """Split an option's text; drop empty parts."""
    return [part.strip() for part in text.split(separator) if part.strip()]


def examples(*lines: str) -> str:
    """Examples for the end of a command's help, one per line."""
    title = "Example" if len(lines) == 1 else "Examples"
    return "\n".join(["\b", f"{title}:", *(f"  {line}" for line in lines)])  # \b: lines stay


def require_writable(path: Path) -> None:
    """Check that a file can be written at `path`, before the computation.

    Raises:
        BadParameter: the path is a directory, or its directory is missing or cannot be written.
    """
    if path.is_dir():
        raise typer.BadParameter(f"{path} is a directory; give the name of a file")
    try:
        with TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise typer.BadParameter(
            f"{path} cannot be written: {error.strerror}; give a file in a writable directory"
        ) from error


def say(text: str, *, err: bool = False) -> None:
    """Print a text; on a terminal, wrap lines between words."""
    console = Console(stderr=err)
    console.print(
        text, markup=False, highlight=False, emoji=False, soft_wrap=not console.is_terminal
    )


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
