"""Files that commands write at the end: `--plot FILE`, drawn results, and `--html FILE`, a page."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from kvkeep.cli.output import require_writable
from kvkeep.errors import MissingPackageError
from kvkeep_lab.extras import needed_by

_AXES = ("length", "context", "tokens")


def check_html(file: Path | None) -> Path | None:
    """Check the file of --html, if there is one; see `check_file`."""
    if file is not None:
        check_file("--html", file, ["html"])
    return file


HtmlFile = Annotated[
    Path | None,
    typer.Option(
        "--html", help="Also write the result as a page, in one .html file.", callback=check_html
    ),
]


def check_file(option: str, file: Path, endings: Sequence[str]) -> None:
    """Check, before anything is measured, that the file of an option can be written afterwards.

    Raises:
        BadParameter: the name has none of the endings, or see `require_writable`.
    """
    if file.suffix.removeprefix(".") not in endings:
        raise typer.BadParameter(f"{option} {file}: the name must end in .{', .'.join(endings)}")
    require_writable(file)


def check_plot(file: Path | None) -> Path | None:
    """Check, before anything is measured, that `file` can be written afterwards; returns it.

    Raises:
        BadParameter: matplotlib is missing or does not support the format, or the file cannot be
            written; see `check_file`.
    """
    if file is not None:
        try:
            formats = _figure().canvas.get_supported_filetypes()
        except MissingPackageError as error:
            raise typer.BadParameter(str(error)) from error
        check_file("--plot", file, sorted(formats))
    return file


PlotFile = Annotated[
    Path | None,
    typer.Option(
        "--plot", help="Also draw the result, in a .png, .svg or .pdf file.", callback=check_plot
    ),
]


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
        panel.set_title(name, fontsize=10)
        panel.set_ylabel(column.replace("_", " "))
        _draw(panel, rows, column)
    figure.savefig(file)


def plot_rows(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows for a plot: the text columns joined to one name, and the numeric columns."""
    found = []
    for row in (row for row in rows if not row.get("skipped")):
        named = [str(x) for key, x in row.items() if isinstance(x, str) and "winner" not in key]
        named += [name for name in ("mass", "chunked") if row.get(name)]
        figures = {n: x for n, x in row.items() if not isinstance(x, str | bool) and n != "skipped"}
        found.append(({"system": " ".join(named)} if named else {}) | figures)
    return found or rows


def plot_tradeoff(title: str, rows: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Draw each spec's loss (divergence, and accuracy of tasks or else perplexity) over the
    bytes it holds, with intervals of 95 %: a labelled point for each row and a colour for each
    model and context, and for kvpress."""
    from kvkeep_lab.evals import tradeoff

    losses, drawn = tradeoff.losses(rows), dict.fromkeys(map(tradeoff.series, rows))
    figure = _figure(figsize=(8 * len(losses), 7), layout="constrained")
    figure.suptitle(title)
    panels = figure.subplots(1, len(losses))
    names = list[list[tuple[str, float, float]]]()
    for panel, (column, label) in zip(panels, losses.items(), strict=True):
        found = [(row, one) for row in rows if (one := tradeoff.figure(row, column))]
        for name in drawn:
            mine = [(row, one) for row, one in found if tradeoff.series(row) == name]
            x, y = [row["bytes"] / 2**20 for row, _ in mine], [one.value for _, one in mine]
            ends = zip(*[(v - low, high - v) for _, (v, low, high) in mine], strict=True)
            panel.errorbar(x, y, list(ends) or None, fmt="o", elinewidth=0.7, label=name)
        panel.set(xscale="log", xlabel="MiB held", ylabel=label)
        panel.margins(x=0.4, y=0.1)
        names.append(
            [(tradeoff.short(r["spec"]), r["bytes"] / 2**20, one.value) for r, one in found]
        )
    # The full cache's divergence is 0, which a logarithmic axis cannot show.
    panels[0].set_yscale("symlog", linthresh=_smallest(row["kl"] for row in rows))
    panels[0].set_ylim(bottom=-0.2 * _smallest(row["kl"] for row in rows))
    if "perplexity" in losses:
        panels[1].set_yscale("log")
    panels[1].legend()
    figure.canvas.draw()  # places the axes, which labels are laid out in
    for panel, points in zip(panels, names, strict=True):
        _labelled(panel, points)
    figure.savefig(file)


def plot_kept(title: str, lines: Mapping[str, Sequence[int]], tokens: int, file: Path) -> None:
    """Draw a line for each head, dark at the positions that it keeps of `tokens`."""
    grid = [[position in kept for position in range(tokens)] for kept in map(set, lines.values())]
    figure = _figure(figsize=(12, 1.5 + 0.12 * max(8, len(lines))), layout="constrained")
    figure.suptitle(title)
    panel = figure.subplots()
    panel.imshow(grid, aspect="auto", cmap="Greys", interpolation="nearest", vmin=0, vmax=1)
    panel.set_xlabel("position")
    every = -(-len(lines) // 40)
    panel.set_yticks(range(0, len(lines), every), list(lines)[::every], fontsize=7)
    figure.savefig(file)


def _draw(panel: Any, rows: Sequence[Mapping[str, Any]], column: str) -> None:
    """Draw a column: lines over the lengths, or bars."""
    axis, label = _axis(rows), _label(rows)
    lengths = sorted({row[axis] for row in rows}) if axis else []
    systems = dict.fromkeys(str(row[label]) if label else "" for row in rows)
    if len(lengths) <= 1:
        panel.bar(list(systems), _heights(rows, column))
        panel.set_xlabel("".join(f"{length:,} {axis}" for length in lengths))
        if len(systems) > 4:
            panel.tick_params(axis="x", rotation=90)
        return
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


def _labelled(panel: Any, points: Sequence[tuple[str, float, float]]) -> None:
    """Write each point's name beside it, in turns left and right, where no other name is."""
    dots = 72 / panel.figure.dpi
    placed = sorted((*panel.transData.transform((x, y)), name, x, y) for name, x, y in points)
    last = {-1: -math.inf, 1: -math.inf}
    for index, (_, height, name, x, y) in enumerate(sorted(placed, key=lambda one: one[1])):
        side = -1 if index % 2 else 1
        last[side] = max(height, last[side] + 8 / dots)
        panel.annotate(
            name,
            (x, y),
            xytext=(12 * side, (last[side] - height) * dots),
            textcoords="offset points",
            ha="left" if side > 0 else "right",
            va="center",
            fontsize=7,
            arrowprops={"arrowstyle": "-", "linewidth": 0.3, "shrinkA": 0, "shrinkB": 0},
        )


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
