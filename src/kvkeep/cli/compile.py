"""`kvkeep compile`: compile a model's decode steps for later processes."""

from __future__ import annotations

from dataclasses import dataclass
from time import monotonic
from typing import Any

from kvkeep.cli.options import OneModel, with_options
from kvkeep.cli.output import DEFAULT_MODEL, JsonFlag, print_json, say
from kvkeep.cli.progress import Working
from kvkeep.options import option


def compile_if_it_pays(
    model: Any, asked: bool | None, tokens: int, working: Working, sequences: int = 1
) -> None:
    """Compile the steps of a loaded model if that saves time and the option is not given.

    Args:
        asked: the option --compile or --no-compile; None: not given.
        tokens: most tokens that the command generates.
        sequences: number of answers that the command generates at once.
    """
    from kvkeep.errors import UnsupportedError
    from kvkeep.hf.compile_ahead import compile_steps, note_tokens, pays

    if asked is not None or not pays(model, tokens, sequences):
        return
    start = monotonic()
    try:
        compile_steps(model, sequences, working)
        say(
            f"compiled decode steps, for later commands too, in {monotonic() - start:.0f} s",
            err=True,
        )
    except UnsupportedError as error:
        note_tokens(model, -1)
        say(f"decode steps are not compiled, now or later: {error}", err=True)


@dataclass(frozen=True)
class Steps(OneModel):
    """Options of `kvkeep compile`."""

    sequences: int = option(1, "Also compile batches of up to this many sequences.", min=1, max=32)


@with_options(Steps)
def compile(asked: Steps, json: JsonFlag = False) -> None:
    """Compile a model's decode steps, for kvkeep.attach and all commands on this machine."""
    model = asked.model or DEFAULT_MODEL
    with Working("starting") as working:
        from kvkeep.hf.compile_ahead import compile_steps
        from kvkeep.hf.models import load

        loaded, _ = load(model, asked.dtype, "cpu", working)
        files = compile_steps(loaded, asked.sequences, working)
    size = sum(file.stat().st_size for file in files)
    if json:
        print_json({"model": model, "files": [str(file) for file in files], "bytes": size})
        return
    count = f"{len(files)} program{'s' if len(files) != 1 else ''}"
    say(f"{model}: {count}, {size / 2**20:.0f} MiB, in {files[0].parent}")
