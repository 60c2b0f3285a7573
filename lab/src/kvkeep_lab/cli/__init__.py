"""The commands of kvkeep-lab."""

from __future__ import annotations

from typing import Any

import typer

from kvkeep.cli.output import examples
from kvkeep_lab.cli.bench import bench
from kvkeep_lab.cli.calibrate import calibrate
from kvkeep_lab.cli.eval import evaluate
from kvkeep_lab.cli.inspect import inspect
from kvkeep_lab.cli.recommend import recommend


def add_to(app: typer.Typer) -> None:
    """Add them to the command `kvkeep`."""

    def add(command: Any, *lines: str, name: str | None = None) -> None:
        app.command(name, epilog=examples(*lines))(command)

    add(evaluate, 'kvkeep eval --specs "keep_all+int8;h2o:512" --context 2000', name="eval")
    add(recommend, "kvkeep recommend --model smollm2-135m --bytes 25%")
    add(
        inspect,
        "kvkeep inspect --prompt-file report.txt --cache h2o:256",
        "kvkeep inspect --context 500 --cache snapkv:128 --layer 3",
    )
    add(calibrate, "kvkeep calibrate --out scorer.safetensors --model smollm2-135m")
    app.add_typer(bench, name="bench")
