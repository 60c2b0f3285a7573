"""Shared by the commands of `kvkeep bench`: options, lists, and the display of results."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from kvkeep.cli.complete import devices, models, one_of, specs
from kvkeep.cli.output import listed, print_json, print_table, whole_numbers
from kvkeep.cli.progress import Working
from kvkeep_lab.cli.plot import plot as draw

Model = Annotated[
    str,
    typer.Option(
        help="A name from `kvkeep models`, a directory, a GGUF file, or a hub name.",
        autocompletion=models,
    ),
]
ModelOrRandom = Annotated[
    str,
    typer.Option(
        help="A name from `kvkeep models`, a directory, a GGUF file, or a hub name; or random-1b, "
        "with random weights; for `bench serve` random-hybrid, random-latent or random-shared too.",
        autocompletion=models,
    ),
]
Host = Annotated[
    str,
    typer.Option(
        help="Library that runs the model: transformers, or litgpt.",
        autocompletion=one_of("transformers", "litgpt"),
    ),
]
Dtype = Annotated[
    str,
    typer.Option(
        help="bfloat16, float16 or float32.",
        autocompletion=one_of("bfloat16", "float16", "float32"),
    ),
]
SpecList = Annotated[
    str, typer.Option(help="Cache specs, separated by semicolons.", autocompletion=specs)
]
Turns = Annotated[int, typer.Option(min=1, help="Rounds of measurement.")]
Device = Annotated[
    str | None,
    typer.Option(
        help="Device, e.g. cpu or cuda; default: CUDA if available.", autocompletion=devices
    ),
]

Ways = Annotated[
    str | None,
    typer.Option(
        help="How kvkeep's steps run, comma-separated: default (as attach() makes them), eager "
        "(without kvkeep's linear layers), compile (in a compiled graph), graph (a CUDA "
        "graph), compiled (in a CUDA graph too); default: default and compile, on CUDA "
        "default, graph and compiled."
    ),
]

Beside = Annotated[
    str | None,
    typer.Option(
        help="Generate beside these numbers of busy processes instead, e.g. 0,1,2: with one "
        "thread, all, and those that kvkeep chooses. --ways also takes batch."
    ),
]


def numbers(text: str | None, option: str, least: int = 1) -> list[int] | None:
    """Parse an option's comma-separated whole numbers of at least `least`; None without text."""
    return None if text is None else whole_numbers(text, option, least)


def names(text: str | None) -> list[str] | None:
    """Parse comma-separated names; None without text."""
    return None if text is None else listed(text, ",")


def measured(benchmark: str, *given: Any, **options: Any) -> dict[str, Any]:
    """The result of a benchmark of `kvkeep_lab.bench`, whose progress is shown."""
    with Working(benchmark) as working:
        run = import_module(f"kvkeep_lab.bench.{benchmark}").run
        result: dict[str, Any] = run(*given, **options, progress=working)
        return result


def show(title: str, result: dict[str, Any], plot: Path | None, json: bool) -> None:
    """Print a result as a table, and as JSON if asked; draw it if there is a file for that."""
    if plot is not None:
        draw(title, {"": plot_rows(result["rows"])}, plot)
    print_table(title, result["rows"], stderr=json)
    if json:
        print_json(result)


def plot_rows(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows for a plot: the text columns joined to one name, and the numeric columns."""
    found = []
    for row in (row for row in rows if not row.get("skipped")):
        named = [str(x) for key, x in row.items() if isinstance(x, str) and "winner" not in key]
        named += [name for name in ("mass", "chunked") if row.get(name)]
        figures = {n: x for n, x in row.items() if not isinstance(x, str | bool) and n != "skipped"}
        found.append(({"system": " ".join(named)} if named else {}) | figures)
    return found or rows
