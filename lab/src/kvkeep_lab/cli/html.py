"""`--html FILE`: a command's result as a page of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

HtmlFile = Annotated[
    Path | None,
    typer.Option("--html", help="Also write the result as a page, in one .html file."),
]


def check_html(file: Path | None) -> None:
    """Check, before anything is measured, that `file` can be written afterwards.

    Raises:
        BadParameter: the name does not end in .html, its directory does not exist, or it is a
            directory itself.
    """
    if file is None:
        return
    if file.suffix != ".html":
        raise typer.BadParameter(f"--html {file}: the name must end in .html")
    if not file.parent.is_dir():
        raise typer.BadParameter(f"--html {file}: there is no directory {file.parent}")
    if file.is_dir():
        raise typer.BadParameter(f"--html {file}: it is a directory; give the name of a file")
