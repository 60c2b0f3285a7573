"""`kvkeep models`: list and fetch the models that have a short name."""

from __future__ import annotations

from typing import Annotated

import typer

from kvkeep.cli.output import JsonFlag, Working, print_json, print_table, reported

models = typer.Typer(
    help="List and fetch models. Local directories and hub names need no fetching.",
    invoke_without_command=True,
)


@models.callback()
def default(context: typer.Context, json: JsonFlag = False) -> None:
    """List the models when no command is given."""
    if context.invoked_subcommand is None:
        list_models(json)


@models.command("list")
def list_models(json: JsonFlag = False) -> None:
    """List the known models and where they are."""
    from kvkeep.hf.models import KNOWN, is_fetched, local_path

    rows = [
        {
            "name": name,
            "fetched": is_fetched(name),
            "path": str(local_path(name)),
            "description": source.description,
        }
        for name, source in KNOWN.items()
    ]
    if json:
        print_json({"models": rows})
    else:
        print_table("Known models", rows)


@models.command()
def fetch(
    name: Annotated[str, typer.Argument(help="A name from `kvkeep models`.")],
    json: JsonFlag = False,
) -> None:
    """Download a known model and convert it, once."""
    with reported():
        from kvkeep.hf.models import fetch as run

        with Working(f"fetching {name}") as working:
            path = run(name, working)
    if json:
        print_json({"name": name, "path": str(path)})
    else:
        typer.echo(path)
