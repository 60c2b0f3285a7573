"""`kvkeep export`: a model's decode step and its cache in one .pt2 file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from kvkeep.cli.options import ModelOptions, with_options
from kvkeep.cli.output import JsonFlag, print_json, require_writable, say
from kvkeep.cli.progress import Working
from kvkeep.options import option


@dataclass(frozen=True)
class Export(ModelOptions):
    """Options of `kvkeep export`."""

    cache: str = option(
        "keep_all@fixed:2048",
        "Cache spec with fixed storage, e.g. window:1024@fixed.",
        complete="specs",
    )
    rows: int = option(1, "Batch size.", min=1)


@with_options(Export)
def export(
    asked: Export,
    output: Annotated[Path, typer.Argument(help="The file to write, *.pt2.")],
    json: JsonFlag = False,
) -> None:
    """Export a model's decode step with its cache, to run without transformers."""
    from kvkeep.graph.export_op import require_exportable
    from kvkeep.graph.program import named
    from kvkeep.spec import CacheSpec, parse_specs

    spec, path = parse_specs(asked.cache), named(output)
    for one in [spec] if isinstance(spec, CacheSpec) else spec.values():
        require_exportable(one)
    require_writable(path)
    with Working("starting") as working:
        from kvkeep.hf.export import export as run

        loaded, tokenizer = asked.load(working)
        working("exporting")
        program = run(loaded, spec, rows=asked.rows, tokenizer=tokenizer)
        working("writing")
        program.save(path)
    size = path.stat().st_size
    if json:
        print_json(
            {
                "path": str(path),
                "bytes": size,
                "model": asked.named,
                "adapter": asked.adapter,
                "cache": str(spec),
                "rows": asked.rows,
                "room": program.header.room,
            }
        )
        return
    say(
        f"{path}: {size / 2**20:.0f} MiB, {spec}, {asked.rows} row"
        f"{'s' if asked.rows > 1 else ''}; run it with kvkeep.Program.load"
    )
