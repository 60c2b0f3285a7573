"""`--plot FILE`: draw a command's results."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from kvkeep.errors import MissingPackageError
from kvkeep.extras import needed_by

PlotFile = Annotated[
    Path | None, typer.Option("--plot", help="Also draw the result, in a .png, .svg or .pdf file.")
]

_AXES = ("length", "context", "tokens")


def check_plot(file: Path | None) -> None:
    """Check, before anything is measured, that `file` can be written afterwards.

    Raises:
        BadParameter: matplotlib is missing or does not support the format, or the directory does
            not exist.
    """
    if file is None:
        return
    try:
        formats = _figure().canvas.get_supported_filetypes()
    except MissingPackageError as error:
        raise typer.BadParameter(str(error)) from error
    if file.suffix.removeprefix(".") not in formats:
        raise typer.BadParameter(
            f"--plot {file}: unknown format; the name must end in one of "
            f"{', '.join(sorted(formats))}"
        )
    if not file.parent.is_dir():
        raise typer.BadParameter(f"--plot {file}: there is no directory {file.parent}")


def plot(
    title: str,
    tables: Mapping[str, Sequence[Mapping[str, Any]]],
    file: Path,
    columns: Collection[str] | None = None,
) -> None:
    """Draw a panel for each measured column of each table over the length held, with a line for
    each system; bars where all rows have one length, or none. A gap where a value is None.

    Args:
        tables: rows of equal keys, by the title of their panels.
        columns: the columns to draw; None: all that are measured.
    """
    drawn = [
        (name, rows, column)
        for name, rows in tables.items()
        for column in _measured(rows)
        if columns is None or column in columns
    ]
    figure = _figure(figsize=(4.5 * len(drawn), 4), layout="constrained")
    figure.suptitle(title)
    panels = figure.subplots(1, len(drawn), squeeze=False)[0]
    for panel, (name, rows, column) in zip(panels, drawn, strict=True):
        axis, label = _axis(rows), _label(rows)
        lengths = sorted({row[axis] for row in rows}) if axis else []
        systems = dict.fromkeys(str(row[label]) if label else "" for row in rows)
        panel.set_title(name, fontsize=10)
        panel.set_ylabel(column.replace("_", " "))
        if len(lengths) <= 1:
            panel.bar(list(systems), _heights(rows, column))
            panel.set_xlabel("".join(f"{length:,} {axis}" for length in lengths))
            if len(systems) > 4:
                panel.tick_params(axis="x", rotation=90)
            continue
        for system in systems:
            mine = [row for row in rows if not label or row[label] == system]
            panel.plot([r[axis] for r in mine], _heights(mine, column), "o-", label=system)
        nothing = all(row[column] is None for row in rows)  # a logarithmic axis needs a value
        panel.set(xscale="log", yscale="linear" if nothing else "log", xlabel=axis)
        panel.set_xticks(lengths, [f"{length:,}" for length in lengths], minor=False)
        panel.minorticks_off()
        if not nothing:
            panel.yaxis.get_major_locator().set_params(subs=(1, 2, 5))
            panel.yaxis.set_major_formatter("{x:,g}")
        if label:
            panel.legend()
    figure.savefig(file)


def plot_tradeoff(title: str, rows: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Draw what each spec loses (divergence, perplexity) over the bytes it holds, a labelled point
    for each row and a colour for each context."""
    figure = _figure(figsize=(13, 5.5), layout="constrained")
    figure.suptitle(title)
    panels = figure.subplots(1, 2)
    # The full cache's divergence is 0, which a logarithmic axis cannot show.
    panels[0].set_yscale("symlog", linthresh=_smallest(row["kl"] for row in rows))
    panels[1].set_yscale("log")
    for panel, column in zip(panels, ("kl", "perplexity"), strict=True):
        for context in dict.fromkeys(row["context"] for row in rows):
            mine = [row for row in rows if row["context"] == context]
            x, y = [row["bytes"] / 2**20 for row in mine], [row[column] for row in mine]
            panel.plot(x, y, "o", label=f"{context:,} tokens")
            # Specs of one budget are above each other, so their labels alternate sides.
            for index, row in enumerate(sorted(mine, key=lambda row: float(row[column]))):
                side = -1 if index % 2 else 1
                panel.annotate(
                    row["spec"],
                    (row["bytes"] / 2**20, row[column]),
                    xytext=(6 * side, 2),
                    textcoords="offset points",
                    ha="left" if side > 0 else "right",
                    fontsize=8,
                )
        panel.set(xscale="log", xlabel="MiB held")
        panel.margins(x=0.25, y=0.1)
    panels[0].set(ylabel="KL to the full cache, nats per token")
    panels[1].set(ylabel="perplexity")
    panels[1].legend()
    figure.savefig(file)


def plot_kept(title: str, lines: Mapping[str, Sequence[int]], tokens: int, file: Path) -> None:
    """Draw a line for each head, dark at the positions that it keeps of `tokens`."""
    grid = [[0] * tokens for _ in lines]
    for row, positions in zip(grid, lines.values(), strict=True):
        for position in positions:
            row[position] = 1
    figure = _figure(figsize=(12, 1.5 + 0.12 * max(8, len(lines))), layout="constrained")
    figure.suptitle(title)
    panel = figure.subplots()
    panel.imshow(grid, aspect="auto", cmap="Greys", interpolation="nearest", vmin=0, vmax=1)
    panel.set_xlabel("position")
    every = -(-len(lines) // 40)
    panel.set_yticks(range(0, len(lines), every), list(lines)[::every], fontsize=7)
    figure.savefig(file)


def _axis(rows: Sequence[Mapping[str, Any]]) -> str:
    """The column with the tokens held, or an empty string."""
    return next((name for name in _AXES if name in rows[0]), "")


def _label(rows: Sequence[Mapping[str, Any]]) -> str | None:
    """The column that names the systems."""
    return next((name for name, value in rows[0].items() if isinstance(value, str)), None)


def _measured(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    beside = (_axis(rows), _label(rows))
    return [name for name in rows[0] if name not in beside and not name.startswith("spread")]


def _figure(**options: Any) -> Any:
    """An empty figure of matplotlib."""
    with needed_by("--plot", "plot"):
        from matplotlib.figure import Figure

    return Figure(**options)


def _heights(rows: Iterable[Mapping[str, Any]], column: str) -> list[Any]:
    return [math.nan if row[column] is None else row[column] for row in rows]


def _smallest(values: Iterable[float]) -> float:
    """The smallest value above 0; 1 if there is none."""
    return min((value for value in values if value > 0), default=1.0)
