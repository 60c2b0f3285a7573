"""`kvkeep calibrate`: train a scorer for the policy `kvzap`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from kvkeep.cli import output
from kvkeep.cli.options import ModelOptions, with_options
from kvkeep.cli.progress import Working
from kvkeep.options import option
from kvkeep_lab.options import text_file


@dataclass(frozen=True)
class Calibrate:
    """Options of `kvkeep_lab.calibrate`."""

    text_file: Path | None = text_file("Calibrate with this UTF-8 text.")
    count: int = option(24, "Excerpts to read.", name="--texts", min=2)
    length: int = option(4096, "Tokens of each excerpt.", min=64)
    hidden: int = option(32, "Units of each head's network.", min=1)
    steps: int = option(600, "Training steps for each layer.", min=1)


@with_options(Calibrate, ModelOptions)
def calibrate(
    asked: Calibrate,
    which: ModelOptions,
    out: Annotated[Path, typer.Option("--out", "-o", dir_okay=False, help="File for the scorer.")],
    json: output.JsonFlag = False,
) -> None:
    """Train a scorer, with which --cache "kvzap:25%,scorer=FILE" keeps a quarter of the slots.

    An interrupted calibration continues where it was when it is started again.
    """
    with Working("starting") as working:
        from kvkeep_lab.calibration.run import calibrate as run

        found = run(*which.load(working), out, **vars(asked), progress=working)
    file = f"{found['file']}, {found['bytes'] / 2**20:.2f} MiB"
    after = f"after {found['tokens']:,} tokens and {found['seconds']:.0f} s"
    title = f"{which.title}: {file}, {after}"
    output.print_table(title, found["layers"], stderr=json)
    if json:
        output.print_json({"model": which.named, "adapter": which.adapter, **found})
