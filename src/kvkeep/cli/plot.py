"""`--plot FILE`: a benchmark's rows as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

_AXES = ("length", "context", "tokens")


def check_plot(file: Path | None) -> None:
    """Raise before anything is measured if `file` could not be written afterwards.

    Raises:
        BadParameter: matplotlib is missing or has no such format, or the directory does not exist.
    """
    if file is None:
        return
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise typer.BadParameter("--plot needs matplotlib; pip install 'kvkeep[plot]'") from error
    formats = Figure().canvas.get_supported_filetypes()
    if file.suffix.removeprefix(".") not in formats:
        raise typer.BadParameter(f"--plot {file}: end it in one of {', '.join(sorted(formats))}")
    if not file.parent.is_dir():
        raise typer.BadParameter(f"--plot {file}: there is no directory {file.parent}")


def plot(title: str, rows: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Draw a panel for each measured column over the length held, with a line for each system; bars
    where all rows have one length."""
    from matplotlib.figure import Figure

    axis = next(name for name in _AXES if name in rows[0])
    label = next((name for name, value in rows[0].items() if isinstance(value, str)), None)
    columns = [n for n in rows[0] if n not in (axis, label) and not n.startswith("spread")]
    lengths = sorted({row[axis] for row in rows})
    systems = dict.fromkeys(str(row[label]) if label else "" for row in rows)
    figure = Figure(figsize=(4.5 * len(columns), 4), layout="constrained")
    figure.suptitle(title)
    panels = figure.subplots(1, len(columns), squeeze=False)[0]
    for panel, column in zip(panels, columns, strict=True):
        panel.set_ylabel(column.replace("_", " "))
        if len(lengths) == 1:
            panel.bar(list(systems), [row[column] for row in rows])
            panel.set_xlabel(f"{lengths[0]:,} {axis}")
            continue
        for system in systems:
            mine = [row for row in rows if not label or row[label] == system]
            panel.plot([r[axis] for r in mine], [r[column] for r in mine], "o-", label=system)
        panel.set(xscale="log", yscale="log", xlabel=axis)
        panel.set_xticks(lengths, [f"{length:,}" for length in lengths], minor=False)
        panel.minorticks_off()
        if label:
            panel.legend()
    figure.savefig(file)
