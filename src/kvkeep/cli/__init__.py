"""The command line, which parses options, calls the library and prints results. Each command
imports what it needs when it runs."""

from __future__ import annotations

from typing import Annotated

from kvkeep import __version__
from kvkeep.extras import needed_by

with needed_by("The command kvkeep", "cli"):
    import rich  # noqa: F401 (every module here may import it)
    import typer

from kvkeep.cli.bench import bench
from kvkeep.cli.calibrate import calibrate
from kvkeep.cli.chat import chat, sessions
from kvkeep.cli.doctor import doctor
from kvkeep.cli.eval import evaluate
from kvkeep.cli.export import export
from kvkeep.cli.finetune import finetune
from kvkeep.cli.generate import generate
from kvkeep.cli.inspect import inspect
from kvkeep.cli.models import models
from kvkeep.cli.serve import serve
from kvkeep.cli.store import store

app = typer.Typer(
    name="kvkeep",
    help="The KV cache for PyTorch language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvkeep {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """The KV cache for PyTorch language models."""


app.command()(generate)
app.command()(chat)
app.command()(serve)
app.command("eval")(evaluate)
app.command()(inspect)
app.command()(calibrate)
app.command()(finetune)
app.command()(export)
app.command()(doctor)
app.add_typer(sessions, name="sessions")
app.add_typer(models, name="models")
app.add_typer(store, name="store")
app.add_typer(bench, name="bench")

__all__ = ["app"]
