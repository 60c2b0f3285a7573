"""`kvkeep export`: a model's decode step and its cache in one .pt2 file."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryFile
from typing import Annotated

import typer

from kvkeep.cli.complete import specs
from kvkeep.cli.output import (
    AdapterName,
    JsonFlag,
    ModelDtype,
    ModelName,
    model_for,
    print_json,
    say,
)
from kvkeep.cli.progress import Working


def export(
    output: Annotated[Path, typer.Argument(help="The file to write, *.pt2.")],
    model: ModelName = None,
    adapter: AdapterName = None,
    cache: Annotated[
        str,
        typer.Option(
            help="Cache spec with fixed storage, e.g. window:1024@fixed.", autocompletion=specs
        ),
    ] = "keep_all@fixed:2048",
    rows: Annotated[int, typer.Option(min=1, help="Batch size.")] = 1,
    dtype: ModelDtype = "auto",
    json: JsonFlag = False,
) -> None:
    """Export a model's decode step with its cache, to run without transformers."""
    model = model_for(model, adapter)
    from kvkeep.graph.export_op import require_exportable
    from kvkeep.graph.program import named
    from kvkeep.spec import CacheSpec, parse_specs

    spec, path = parse_specs(cache), named(output)
    for one in [spec] if isinstance(spec, CacheSpec) else spec.values():
        require_exportable(one)
    _require_writable(path)
    with Working("starting") as working:
        from kvkeep.hf.export import export as run
        from kvkeep.hf.models import load

        loaded, tokenizer = load(model, dtype, None, working, adapter=adapter)
        working("exporting")
        program = run(loaded, spec, rows=rows, tokenizer=tokenizer)
        working("writing")
        program.save(path)
    size = path.stat().st_size
    if json:
        print_json(
            {
                "path": str(path),
                "bytes": size,
                "model": model,
                "adapter": adapter,
                "cache": str(spec),
                "rows": rows,
                "room": program.header.room,
            }
        )
        return
    say(
        f"{path}: {size / 2**20:.0f} MiB, {spec}, {rows} row{'s' if rows > 1 else ''}; run it with "
        "kvkeep.Program.load"
    )


def _require_writable(path: Path) -> None:
    """Check that a file can be written at `path`, before the computation.

    Raises:
        BadParameter: the path is a directory, or its directory is missing or cannot be written.
    """
    if path.is_dir():
        raise typer.BadParameter(f"{path} is a directory; give the name of a file")
    try:
        with TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise typer.BadParameter(
            f"{path} cannot be written: {error.strerror}; give a file in a writable directory"
        ) from error
