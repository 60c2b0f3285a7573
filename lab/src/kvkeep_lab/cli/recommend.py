"""`kvkeep recommend`: the cache specs that lose least for their bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kvkeep.cli.output import (
    AdapterName,
    JsonFlag,
    ModelDtype,
    ModelName,
    model_for,
    print_json,
    print_table,
    say,
    titled,
)
from kvkeep.cli.progress import Working


def recommend(
    model: ModelName = None,
    adapter: AdapterName = None,
    budget: Annotated[
        str, typer.Option("--bytes", help="Most bytes, as a share of the full cache's.")
    ] = "25%",
    specs: Annotated[
        str | None,
        typer.Option(help="Try these specs, separated by semicolons, in place of kvkeep's list."),
    ] = None,
    dtype: ModelDtype = "auto",
    context: Annotated[int, typer.Option(min=1, help="Tokens fed before the continuation.")] = 2000,
    continuation: Annotated[int, typer.Option(min=1, help="Tokens predicted.")] = 64,
    windows: Annotated[int, typer.Option(min=1, help="Places of the text.")] = 10,
    text: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="Use this UTF-8 text instead."),
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Try cache specs on a model and a text, and show which lose least for the bytes they hold."""
    share = _share(budget)
    model = model_for(model, adapter)
    with Working("starting") as working:
        from kvkeep.spec import split_specs
        from kvkeep_lab.evals.recommended import recommend as tried

        result = tried(
            model,
            specs=() if specs is None else split_specs(specs),
            adapter=adapter,
            dtype=dtype,
            context=context,
            continuation=continuation,
            windows=windows,
            text_file=text,
            progress=working,
        )
    full, rows = result["baseline"][0]["bytes"], result["front"]
    title = f"{titled(model, adapter)}, {dtype}, {windows} places of {continuation} tokens"
    print_table(title, [_columns(row, full) for row in rows], stderr=json)
    within = [row for row in rows if row["bytes"] <= share * full]
    if within:
        say(f'--cache "{within[-1]["spec"]}"', err=json)
    else:
        say(f"no spec holds {budget} of the full cache's bytes; give more --bytes", err=True)
    if json:
        print_json(result)


def _share(text: str) -> float:
    try:
        share = float(text.removesuffix("%")) / 100
    except ValueError:
        share = 0.0
    if not (text.endswith("%") and 0 < share <= 1):
        raise typer.BadParameter(f"--bytes {text}: give a share from 1% to 100%, such as 25%")
    return share


def _columns(row: dict[str, Any], full: int) -> dict[str, Any]:
    interval = "{:.2g}..{:.2g}".format(*row["kl_95"])
    return {
        "spec": row["spec"],
        "bytes %": 100 * row["bytes"] / full,
        "kl": row["kl"],
        "95%": interval,
    }
