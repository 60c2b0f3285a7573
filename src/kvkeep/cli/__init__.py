"""The command line: parses, calls, prints. Commands import what they need when they run."""

from __future__ import annotations

import typer

from kvkeep.cli.bench import bench
from kvkeep.cli.doctor import doctor
from kvkeep.cli.generate import generate
from kvkeep.cli.models import models

app = typer.Typer(
    name="kvkeep",
    help="The KV cache for PyTorch language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)
app.command()(generate)
app.command()(doctor)
app.add_typer(models, name="models")
app.add_typer(bench, name="bench")

__all__ = ["app"]
