"""`kvkeep bench`: measure kvkeep and other systems on the same tasks."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer

from kvkeep.cli.errors import Group
from kvkeep.cli.options import with_options
from kvkeep.cli.output import JsonFlag, examples, listed, print_json, print_table, say
from kvkeep.cli.progress import Working
from kvkeep_lab.bench.options import BENCHMARKS, Benchmark
from kvkeep_lab.cli.plot import PlotFile, check_plot, plot_rows
from kvkeep_lab.cli.plot import plot as draw_plot

bench = typer.Typer(
    cls=Group,
    help="Measure kvkeep against other caches.",
    no_args_is_help=True,
    epilog=examples("kvkeep bench decode --plot decode.svg"),
)


def _add(name: str, options: type[Benchmark]) -> None:
    """Add the command that runs a benchmark and shows its result."""

    @with_options(options)
    def command(asked: Benchmark, plot: PlotFile = None, json: JsonFlag = False) -> None:
        with Working(name) as working:
            run = import_module(f"kvkeep_lab.bench.{name}").run
            result = run(asked, progress=working)
        title, rows, notes = asked.heading(result), result["rows"], asked.notes(result)
        if plot is not None:
            draw_plot(title, {"": plot_rows(rows)}, plot, asked.drawn)
        print_table(title, rows, stderr=json)
        if notes:
            say(notes, err=json)
        if json:
            print_json(result)

    example = examples(f"kvkeep bench {options.example}")
    bench.command(name, help=options.__doc__, epilog=example)(command)


for _name, _options in BENCHMARKS.items():
    _add(_name, _options)


@bench.command(epilog=examples("kvkeep bench draw decode.json --plot decode.svg"))
def draw(
    records: Annotated[
        list[Path], typer.Argument(help="Files, each with the --json output of a benchmark.")
    ],
    plot: Annotated[
        Path,
        typer.Option("--plot", help="A .png, .svg or .pdf file to write.", callback=check_plot),
    ],
    columns: Annotated[
        str | None, typer.Option(help="The figures to draw, comma-separated; all by default.")
    ] = None,
) -> None:
    """Draw recorded results side by side, with a line for each system."""
    from kvkeep_lab.bench.record import read

    found = [read(path) for path in records]
    named = None if columns is None else listed(columns, ",")
    for one in found:
        if named is not None and not set(named) & set(one.rows[0]):
            raise typer.BadParameter(
                f"{one.path} has none of {columns}; it has {', '.join(one.rows[0])}"
            )
    machines = dict.fromkeys(one.machine for one in found)
    draw_plot("; ".join(machines), {one.title: plot_rows(one.rows) for one in found}, plot, named)
