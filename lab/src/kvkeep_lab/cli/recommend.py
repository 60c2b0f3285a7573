"""`kvkeep recommend`: the cache specs that lose least for their bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from kvkeep.cli import output
from kvkeep.cli.options import ModelOptions, with_options
from kvkeep.cli.progress import Working
from kvkeep.options import option
from kvkeep_lab.options import spec_list, text_file


@dataclass(frozen=True)
class Recommend(ModelOptions):
    """Options of `kvkeep_lab.evals.recommended.recommend`."""

    specs: Sequence[str] = spec_list(
        (), "Try these specs, separated by semicolons, in place of kvkeep's list."
    )
    context: int = option(2000, "Tokens fed before the continuation.", min=1)
    continuation: int = option(64, "Tokens predicted.", min=1)
    windows: int = option(10, "Places of the text.", min=1)
    text_file: Path | None = text_file()


@with_options(Recommend)
def recommend(
    asked: Recommend,
    budget: Annotated[
        str, typer.Option("--bytes", help="Most bytes, as a share of the full cache's.")
    ] = "25%",
    json: output.JsonFlag = False,
) -> None:
    """Try cache specs on a model and a text, and show which lose least for the bytes they hold."""
    from kvkeep.policy import Share

    try:
        share = Share.parse(budget)
    except ValueError as error:
        raise typer.BadParameter(f"--bytes {budget}: give a share such as 25%") from error
    with Working("starting") as working:
        from kvkeep_lab.evals.recommended import recommend as tried

        result = tried(**vars(replace(asked, model=asked.named)), progress=working)
    full, rows = result["baseline"][0]["bytes"], result["front"]
    places = f"{asked.windows} places of {asked.continuation} tokens"
    title = f"{asked.title}, {asked.dtype}, {places}"
    output.print_table(title, [_columns(row, full) for row in rows], stderr=json)
    within = [row for row in rows if row["bytes"] <= share * full]
    if within:
        output.say(f'--cache "{within[-1]["spec"]}"', err=json)
    else:
        output.say(f"no spec holds {budget} of the full cache's bytes; give more --bytes", err=True)
    if json:
        output.print_json(result)


def _columns(row: dict[str, Any], full: int) -> dict[str, Any]:
    shown = {"spec": row["spec"], "bytes %": 100 * row["bytes"] / full, "kl": row["kl"]}
    return shown | {"95%": "{:.2g}..{:.2g}".format(*row["kl_95"])}
