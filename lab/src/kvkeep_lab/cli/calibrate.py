"""`kvkeep calibrate`: train a scorer for the policy `kvzap`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvkeep.cli.output import (
    AdapterName,
    JsonFlag,
    ModelDtype,
    ModelName,
    model_for,
    print_json,
    print_table,
    titled,
)
from kvkeep.cli.progress import Working


def calibrate(
    out: Annotated[Path, typer.Option("--out", "-o", dir_okay=False, help="File for the scorer.")],
    model: ModelName = None,
    adapter: AdapterName = None,
    text: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="Calibrate with this UTF-8 text."),
    ] = None,
    texts: Annotated[int, typer.Option(min=2, help="Excerpts to read.")] = 24,
    length: Annotated[int, typer.Option(min=64, help="Tokens of each excerpt.")] = 4096,
    hidden: Annotated[int, typer.Option(min=1, help="Units of each head's network.")] = 32,
    steps: Annotated[int, typer.Option(min=1, help="Training steps for each layer.")] = 600,
    dtype: ModelDtype = "auto",
    json: JsonFlag = False,
) -> None:
    """Train a scorer, with which --cache "kvzap:25%,scorer=FILE" keeps a quarter of the slots.

    An interrupted calibration continues where it was when it is started again.
    """
    model = model_for(model, adapter)
    with Working("starting") as working:
        from kvkeep.host import load_model
        from kvkeep_lab.calibration.run import calibrate as run

        loaded, tokenizer = load_model(model, dtype, progress=working, adapter=adapter)
        found = run(
            loaded,
            tokenizer,
            out,
            text_file=text,
            count=texts,
            length=length,
            hidden=hidden,
            steps=steps,
            progress=working,
        )
    title = (
        f"{titled(model, adapter)}: {found['file']}, {found['bytes'] / 2**20:.2f} MiB, after "
        f"{found['tokens']:,} tokens and {found['seconds']:.0f} s"
    )
    print_table(title, found["layers"], stderr=json)
    if json:
        print_json({"model": model, "adapter": adapter, **found})
