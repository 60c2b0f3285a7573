"""`kvkeep finetune`: train an adapter or a model with the cache that will serve it."""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from kvkeep.cli.errors import reported
from kvkeep.cli.options import OneModel, device_option, with_options
from kvkeep.cli.output import DEFAULT_MODEL, JsonFlag, print_json, say
from kvkeep.cli.progress import Working
from kvkeep.finetune.options import Options
from kvkeep.libraries import LIBRARIES
from kvkeep.options import option


@dataclass(frozen=True)
class Finetune(OneModel):
    """Options of `kvkeep finetune` beside those of the training."""

    host: str = option(
        "transformers",
        "Library of the model: transformers, or litgpt, whose --model is a checkpoint directory.",
        values=tuple(LIBRARIES),
    )
    chunk: str | None = option(
        None,
        "Tokens in each chunk; default: 1024, or the budget or the policy's step if less. "
        "256-1024: each step draws a size.",
    )
    resume: bool = option(False, "Continue from the newest checkpoint in --out.", flag=True)
    device: str | None = device_option()


@with_options(Finetune, Options)
def finetune(
    asked: Finetune,
    options: Options,
    data: Annotated[
        Path,
        typer.Argument(
            exists=True,
            dir_okay=False,
            help='JSON Lines, UTF-8: {"text": ...} or {"messages": [...]} on each line; '
            'to classify: {"text": ..., "label": ...}.',
        ),
    ],
    out: Annotated[
        Path, typer.Option("--out", "-o", file_okay=False, help="Directory for the result.")
    ],
    context: typer.Context,
    json: JsonFlag = False,
) -> None:
    """Train a LoRA adapter, or all weights, on long texts, with the cache that will serve them."""
    model, evaluation = asked.model or DEFAULT_MODEL, options.evaluation
    least_chunk, chunk_size = _chunks(asked.chunk)
    options = replace(options, chunk=chunk_size, least_chunk=least_chunk)
    leads = os.environ.get("RANK", "0") == "0"
    with _ended(), reported(debug=context.find_root().params["debug"]):
        with Working("starting", shown=leads) as working:
            import torch

            from kvkeep.finetune.classify import labelled, labels_of
            from kvkeep.finetune.data import formed
            from kvkeep.finetune.processes import launched
            from kvkeep.finetune.run import finetune as run
            from kvkeep.host import load_model
            from kvkeep.host.placement import device_named

            with launched(device_named(asked.device), offload=options.offload) as place:
                # Check options and data before loading the model.
                options = options.checked()
                classify = options.task == "classify"
                for file in (data, *([] if evaluation is None else [evaluation])):
                    (labelled if classify else formed)(file)
                labels = labels_of(data) if classify else None
                torch.manual_seed(options.seed)  # a new classification head is random
                loaded, tokenizer = load_model(
                    model,
                    _dtype(asked.dtype, options.full, options.offload and place.type != "cpu"),
                    host=asked.host,
                    # The shards are moved later.
                    device="cpu" if options.full or options.offload else str(place),
                    progress=working,
                    labels=labels,
                )
                result = run(
                    loaded,
                    tokenizer,
                    data,
                    out,
                    options,
                    resume=asked.resume,
                    device=place,
                    progress=working,
                )
        if leads:
            _print(model, result, json)


def _print(model: str, result: dict[str, Any], json: bool) -> None:
    if json:
        print_json({"model": model, **result})
        return
    losses = ""
    if result["untuned_loss"] is not None:
        losses = f"; loss {result['untuned_loss']:.4f} before, {result['tuned_loss']:.4f} after"
    if result.get("untuned_accuracy") is not None:
        before, after = result["untuned_accuracy"], result["tuned_accuracy"]
        losses += f"; accuracy {before:.1%} before, {after:.1%} after"
    say(
        f"{result['out']}: {result['steps']} steps, {result['tokens']:,} tokens, "
        f"{result['seconds']:.0f} s{losses} ({result['cache']})"
    )


def _dtype(name: str, full: bool, offload: bool) -> str:
    """The dtype for loading a model."""
    if name == "auto" and full:
        return "float32"  # small updates of all weights would be lost in bfloat16
    return "bfloat16" if name == "auto" and offload else name


@contextmanager
def _ended() -> Iterator[None]:
    """A context that ends a process of torchrun immediately, without freeing its process group:
    Python would wait for gloo's thread, which may wait for the GIL to free a tensor."""
    if "RANK" not in os.environ:
        yield
        return
    code = 1
    try:
        yield
        code = 0
    except typer.Exit as error:
        code = error.exit_code
    except SystemExit as error:
        code = int(error.code or 0)
    except BaseException:
        traceback.print_exc()  # Python does not print it after os._exit
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _chunks(text: str | None) -> tuple[int | None, int | None]:
    """The least number of tokens in a chunk (None: fixed size), and the greatest."""
    if text is None:
        return None, None
    found = re.fullmatch(r"(?:([1-9][0-9]*)-)?([1-9][0-9]*)", text.strip())
    if found is None:
        raise typer.BadParameter(f"a chunk of {text!r}; give a number, or a range such as 256-1024")
    return None if found[1] is None else int(found[1]), int(found[2])
