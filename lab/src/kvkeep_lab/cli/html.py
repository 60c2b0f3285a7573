"""Files that commands write at the end, and `--html FILE`: a result as a page of its own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

HtmlFile = Annotated[
    Path | None,
    typer.Option("--html", help="Also write the result as a page, in one .html file."),
]


def check_html(file: Path | None) -> None:
    """Check the file of --html, if there is one; see `check_file`."""
    if file is not None:
        check_file("--html", file, ["html"])


def check_file(option: str, file: Path, endings: Sequence[str]) -> None:
    """Check, before anything is measured, that the file of an option can be written afterwards.

    Raises:
        BadParameter: the name has none of the endings, its directory does not exist, or it is a
            directory itself.
    """
    if file.suffix.removeprefix(".") not in endings:
        raise typer.BadParameter(f"{option} {file}: the name must end in .{', .'.join(endings)}")
    if not file.parent.is_dir():
        raise typer.BadParameter(f"{option} {file}: there is no directory {file.parent}")
    if file.is_dir():
        raise typer.BadParameter(f"{option} {file}: it is a directory; give the name of a file")
