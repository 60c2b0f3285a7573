"""`kvkeep finetune`: train an adapter or a model with the cache that it will be served with."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvkeep.cli.output import (
    DEFAULT_MODEL,
    Advancing,
    JsonFlag,
    ModelDtype,
    ModelName,
    print_json,
    reported,
    size_in_bytes,
)

_PACE = 3600.0  # seconds over which speed is averaged, since a step may take minutes


def finetune(
    data: Annotated[
        Path,
        typer.Argument(
            exists=True,
            dir_okay=False,
            help='JSON Lines, UTF-8: {"text": ...} or {"messages": [...]} on each line.',
        ),
    ],
    out: Annotated[
        Path, typer.Option("--out", "-o", file_okay=False, help="Directory for the result.")
    ],
    model: ModelName = None,
    cache: Annotated[
        str, typer.Option(help="Cache spec, the one to serve the result with.")
    ] = "h2o:1024",
    chunk: Annotated[
        int | None,
        typer.Option(
            min=1, help="Tokens in each chunk; default: 1024, or the budget if that is less."
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
        str, typer.Option(help="How the learning rate falls to 0: linear or cosine.")
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
    dtype: ModelDtype = "auto",
    device: Annotated[str | None, typer.Option(help="A torch device.")] = None,
    json: JsonFlag = False,
) -> None:
    """Train a LoRA adapter, or all weights, on long texts, with the cache that will serve them."""
    model = model or DEFAULT_MODEL
    host_bytes = None if host_memory is None else size_in_bytes(host_memory)
    with reported(), Advancing("starting", _PACE) as advancing:
        from kvkeep.finetune.options import Options
        from kvkeep.finetune.run import finetune as run
        from kvkeep.hf.models import load

        options = Options(
            cache=cache,
            chunk=chunk,
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
            host_bytes=host_bytes,
            spill=None if spill is None else str(spill),
        ).checked()  # before the model is loaded
        if full and dtype == "auto":
            dtype = "float32"  # small updates of all weights would be lost in bfloat16
        loaded, tokenizer = load(model, dtype, device, lambda doing: advancing(doing, 0.0))
        result = run(
            loaded,
            tokenizer,
            data,
            out,
            options,
            evaluation=evaluation,
            holdout=holdout,
            resume=resume,
            progress=advancing,
        )
    if json:
        print_json({"model": model, **result})
        return
    losses = ""
    if result["untuned_loss"] is not None:
        losses = f"; loss {result['untuned_loss']:.4f} before, {result['tuned_loss']:.4f} after"
    typer.echo(
        f"{result['out']}: {result['steps']} steps, {result['tokens']:,} tokens, "
        f"{result['seconds']:.0f} s{losses} ({result['cache']})"
    )
