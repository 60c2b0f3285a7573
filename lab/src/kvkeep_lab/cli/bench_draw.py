"""`kvkeep bench draw`: recorded results of benchmarks as one picture."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvkeep_lab.cli.bench_options import names, plot_rows
from kvkeep_lab.cli.plot import check_plot
from kvkeep_lab.cli.plot import plot as draw_plot


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
    named = names(columns)
    for one in found:
        if named is not None and not set(named) & set(one.rows[0]):
            raise typer.BadParameter(
                f"{one.path} has none of {columns}; it has {', '.join(one.rows[0])}"
            )
    machines = dict.fromkeys(one.machine for one in found)
    draw_plot("; ".join(machines), {one.title: plot_rows(one.rows) for one in found}, plot, named)
