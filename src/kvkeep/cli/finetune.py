"""`kvkeep finetune`: train an adapter or a model with the cache that it will be served with."""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from kvkeep.cli.complete import one_of, specs
from kvkeep.cli.errors import reported
from kvkeep.cli.output import (
    DEFAULT_MODEL,
    DeviceName,
    JsonFlag,
    ModelDtype,
    ModelName,
    print_json,
    say,
    size_in_bytes,
)
from kvkeep.cli.progress import Working


def finetune(
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
    model: ModelName = None,
    host: Annotated[
        str,
        typer.Option(
            help="Library of the model: transformers, or litgpt, whose --model is a checkpoint "
            "directory.",
            autocompletion=one_of("transformers", "litgpt"),
        ),
    ] = "transformers",
    task: Annotated[
        str,
        typer.Option(
            help="What is learned: text, or classify.", autocompletion=one_of("text", "classify")
        ),
    ] = "text",
    cache: Annotated[
        str,
        typer.Option(help="Cache spec, the one to serve the result with.", autocompletion=specs),
    ] = "h2o:1024",
    chunk: Annotated[
        str | None,
        typer.Option(
            help="Tokens in each chunk; default: 1024, or the budget or the policy's step if less. "
            "256-1024: each step draws a number."
        ),
    ] = None,
    length: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="Most tokens of a piece of text; default: 8192, or the model's context if that is "
            "less.",
        ),
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Training steps.")] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Passes over the data.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Pieces of text in a batch.")] = 1,
    accumulate: Annotated[int, typer.Option(min=1, help="Batches in a step.")] = 1,
    full: Annotated[
        bool, typer.Option("--full", help="Train all weights, not an adapter.")
    ] = False,
    rank: Annotated[int | None, typer.Option(min=1, help="Rank of LoRA; default: 16.")] = None,
    alpha: Annotated[
        int | None,
        typer.Option(min=1, help="LoRA's alpha; its scale is alpha / rank; default: 32."),
    ] = None,
    dropout: Annotated[
        float | None, typer.Option(min=0.0, help="Dropout of LoRA; default: 0.")
    ] = None,
    targets: Annotated[
        str | None,
        typer.Option(
            help="Modules that get an adapter, comma-separated; default: all linear ones."
        ),
    ] = None,
    lr: Annotated[
        float | None,
        typer.Option(help="AdamW's learning rate; default: 2e-4, or 1e-5 with --full."),
    ] = None,
    warmup: Annotated[int, typer.Option(min=0, help="Steps in which the learning rate rises.")] = 0,
    decay: Annotated[
        str,
        typer.Option(
            help="How the learning rate falls to 0: linear or cosine.",
            autocompletion=one_of("linear", "cosine"),
        ),
    ] = "linear",
    clip: Annotated[
        float, typer.Option(min=0.0, help="Greatest norm of a step's gradients; 0: no limit.")
    ] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed for weights, order and dropout.")] = 0,
    evaluation: Annotated[
        Path | None,
        typer.Option("--eval", exists=True, dir_okay=False, help="Evaluate on this file."),
    ] = None,
    holdout: Annotated[
        int | None,
        typer.Option(
            min=0, help="Evaluate on this many last documents instead of training on them."
        ),
    ] = None,
    eval_every: Annotated[
        int, typer.Option(min=0, help="Steps between evaluations; 0: at the end only.")
    ] = 0,
    save_every: Annotated[
        int, typer.Option(min=0, help="Steps between checkpoints; 0: at the end only.")
    ] = 0,
    keep: Annotated[int, typer.Option(min=1, help="Newest checkpoints to keep.")] = 2,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue from the newest checkpoint in --out.")
    ] = False,
    host_memory: Annotated[
        str | None,
        typer.Option(help="Most host memory for the layers' stored inputs, e.g. 8GB."),
    ] = None,
    spill: Annotated[
        Path | None,
        typer.Option(
            exists=True, file_okay=False, help="Directory for the inputs that exceed --host-memory."
        ),
    ] = None,
    offload: Annotated[
        bool,
        typer.Option(
            "--offload", help="Hold weights, gradients and the optimizer in host memory (FSDP2)."
        ),
    ] = False,
    context_parallel: Annotated[
        int, typer.Option(min=1, help="Processes that share each text, under torchrun.")
    ] = 1,
    dtype: ModelDtype = "auto",
    device: DeviceName = None,
    json: JsonFlag = False,
) -> None:
    """Train a LoRA adapter, or all weights, on long texts, with the cache that will serve them."""
    model = model or DEFAULT_MODEL
    host_bytes = None if host_memory is None else size_in_bytes(host_memory, "--host-memory")
    least_chunk, chunk_size = _chunks(chunk)
    leads = os.environ.get("RANK", "0") == "0"
    with _ended(), reported(debug=context.find_root().params["debug"]):
        with Working("starting", shown=leads) as working:
            import torch

            from kvkeep.finetune.classify import labelled, labels_of
            from kvkeep.finetune.data import formed
            from kvkeep.finetune.options import Options
            from kvkeep.finetune.processes import launched
            from kvkeep.finetune.run import finetune as run
            from kvkeep.host import load_model
            from kvkeep.host.placement import device_named

            options = Options(
                task=task,
                cache=cache,
                chunk=chunk_size,
                least_chunk=least_chunk,
                length=length,
                batch=batch,
                accumulate=accumulate,
                full=full,
                rank=rank,
                alpha=alpha,
                dropout=dropout,
                targets=targets,
                lr=lr,
                warmup=warmup,
                decay=decay,
                clip=clip,
                steps=steps,
                epochs=epochs,
                seed=seed,
                eval_every=eval_every,
                save_every=save_every,
                keep=keep,
                offload=offload,
                context_parallel=context_parallel,
                host_bytes=host_bytes,
                spill=None if spill is None else str(spill),
            )
            with launched(device_named(device), offload=offload) as place:
                # What is wrong with these shows before the model is loaded.
                options = options.checked()
                for file in (data, *([] if evaluation is None else [evaluation])):
                    (labelled if task == "classify" else formed)(file)
                labels = labels_of(data) if task == "classify" else None
                torch.manual_seed(seed)  # a new head for classes is drawn
                loaded, tokenizer = load_model(
                    model,
                    _dtype(dtype, full, offload and place.type != "cpu"),
                    host=host,
                    # The shards are moved afterwards.
                    device="cpu" if full or offload else str(place),
                    progress=working,
                    labels=labels,
                )
                result = run(
                    loaded,
                    tokenizer,
                    data,
                    out,
                    options,
                    evaluation=evaluation,
                    holdout=holdout,
                    resume=resume,
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
    """The dtype to load a model in, on the CPU if it will be sharded."""
    if name == "auto" and full:
        return "float32"  # small updates of all weights would be lost in bfloat16
    return "bfloat16" if name == "auto" and offload else name


@contextmanager
def _ended() -> Iterator[None]:
    """A context at whose end a process of torchrun exits at once. Its group is not freed: Python
    would wait for gloo's thread, and that thread, if it still holds a tensor, for Python's lock."""
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
        traceback.print_exc()  # Python would print it after the end
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _chunks(text: str | None) -> tuple[int | None, int | None]:
    """The least number of tokens in a chunk, if it is drawn, and the greatest."""
    if text is None:
        return None, None
    found = re.fullmatch(r"(?:([1-9][0-9]*)-)?([1-9][0-9]*)", text.strip())
    if found is None:
        raise typer.BadParameter(f"a chunk of {text!r}; give a number, or two such as 256-1024")
    return None if found[1] is None else int(found[1]), int(found[2])
