"""The command `kvkeep`: its own subcommands, and subcommands of other packages."""

from __future__ import annotations

import sys
from importlib.metadata import entry_points
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Annotated, Any

import typer

from kvkeep.cli.chat import chat, sessions
from kvkeep.cli.compile import compile
from kvkeep.cli.doctor import doctor
from kvkeep.cli.errors import Commands
from kvkeep.cli.export import export
from kvkeep.cli.finetune import finetune
from kvkeep.cli.generate import generate
from kvkeep.cli.models import models
from kvkeep.cli.output import examples
from kvkeep.cli.serve import serve
from kvkeep.cli.store import store
from kvkeep.version import __version__

app = typer.Typer(
    name="kvkeep",
    help="The KV cache for PyTorch language models.",
    cls=Commands,
    rich_markup_mode=None,  # rich would truncate long words
    no_args_is_help=True,
    pretty_exceptions_enable=False,  # errors.py prints errors
    epilog=examples('kvkeep generate "Why is the sky blue?" --cache window:1024,sinks=4'),
)


def import_file(path: Path) -> None:
    """Run a Python file as a module.

    Raises:
        BadParameter: the file is not a Python file, or raises an exception.
    """
    name = f"kvkeep_import_{path.stem}"
    spec = spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise typer.BadParameter(f"--import {path}: not a Python file; its name must end in .py")
    # Dataclasses look up their module in sys.modules to resolve the types of their fields.
    module = sys.modules[name] = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # a user's file may raise any exception
        raise typer.BadParameter(
            f"--import {path}: {type(error).__name__}: {error}; correct the file"
        ) from error


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
    debug: Annotated[
        bool,
        typer.Option("--debug", help="Show the traceback of an error; may be given anywhere."),
    ] = False,
    imports: Annotated[
        list[Path],
        typer.Option(
            "--import",
            metavar="FILE",
            exists=True,
            dir_okay=False,
            help="Run a Python file first, e.g. to add a policy; may be given anywhere, and "
            "repeatedly.",
        ),
    ] = [],  # noqa: B006 (typer needs a list here)
) -> None:
    """The KV cache for PyTorch language models."""
    for file in imports:
        import_file(file)


def _add(command: Any, *lines: str, name: str | None = None) -> None:
    app.command(name, epilog=examples(*lines))(command)


_add(
    generate,
    'kvkeep generate "Why is the sky blue?" --cache window:1024,sinks=4',
    'kvkeep generate "Summarise:" < report.txt > summary.txt',
)
_add(chat, "kvkeep chat --session work --cache h2o:1024")
_add(serve, "kvkeep serve --model Qwen/Qwen3-0.6B --cache keep_all+int8 --port 8000")
_add(finetune, "kvkeep finetune notes.jsonl --out adapter --cache h2o:1024 --epochs 2")
_add(compile, "kvkeep compile --model Qwen/Qwen3-0.6B --sequences 16")
_add(export, "kvkeep export model.pt2 --cache window:1024@fixed")
_add(doctor, "kvkeep doctor")
app.add_typer(sessions, name="sessions")
app.add_typer(models, name="models")
app.add_typer(store, name="store")
for entry in entry_points(group="kvkeep.commands"):
    try:
        entry.load()(app)
    except Exception as error:  # e.g. a broken import; the other commands still work
        typer.echo(f"warning: the commands of {entry.value} cannot be loaded: {error}", err=True)

__all__ = ["app"]
