"""`kvkeep compile`: a model's decode steps, compiled for all later processes."""

from __future__ import annotations

from typing import Annotated

import typer

from kvkeep.cli.output import (
    JsonFlag,
    ModelDtype,
    ModelName,
    model_for,
    print_json,
    say,
)
from kvkeep.cli.progress import Working


def compile(
    model: ModelName = None,
    sequences: Annotated[
        int, typer.Option(min=1, max=32, help="Also batches of up to this many sequences.")
    ] = 1,
    dtype: ModelDtype = "auto",
    json: JsonFlag = False,
) -> None:
    """Compile a model's decode steps, for kvkeep.attach and all commands on this machine."""
    model = model_for(model, None)
    with Working("starting") as working:
        from kvkeep.hf.compile_ahead import compile_steps
        from kvkeep.hf.models import load

        loaded, _ = load(model, dtype, "cpu", working)
        files = compile_steps(loaded, sequences, working)
    size = sum(file.stat().st_size for file in files)
    if json:
        print_json({"model": model, "files": [str(file) for file in files], "bytes": size})
        return
    count = f"{len(files)} program{'s' if len(files) != 1 else ''}"
    say(f"{model}: {count}, {size / 2**20:.0f} MiB, in {files[0].parent}")
