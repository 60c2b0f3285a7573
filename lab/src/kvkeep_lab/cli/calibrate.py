"""`kvkeep calibrate`: train a scorer for the policy `kvzap`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvkeep.cli import output
from kvkeep.cli.options import ModelOptions, with_options
from kvkeep.cli.progress import Working
from kvkeep_lab.calibration.options import CalibrationOptions


@with_options(CalibrationOptions, ModelOptions)
def calibrate(
    asked: CalibrationOptions,
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
