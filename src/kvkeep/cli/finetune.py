"""`kvkeep finetune`: a LoRA adapter, trained through the cache it will be served with."""

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

_PACE = 3600.0  # a step may take minutes


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
        Path, typer.Option("--out", "-o", file_okay=False, help="Where the adapter goes.")
    ],
    model: ModelName = None,
    cache: Annotated[str, typer.Option(help="What to keep, as when it is served.")] = "h2o:1024",
    chunk: Annotated[
        int | None,
        typer.Option(
            min=1, help="Tokens computed at once; by default 1024, or the budget if less."
        ),
    ] = None,
    length: Annotated[
        int | None,
        typer.Option(
            min=2, help="Most tokens of a piece; by default 8192, or what the model holds if less."
        ),
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="How long to train.")] = None,
    epochs: Annotated[
        int | None, typer.Option(min=1, help="How long to train, in turns through all the data.")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Pieces computed together.")] = 1,
    accumulate: Annotated[int, typer.Option(min=1, help="Batches that make a step.")] = 1,
    rank: Annotated[int, typer.Option(min=1, help="Of LoRA.")] = 16,
    alpha: Annotated[int, typer.Option(min=1, help="Of LoRA; its scale is alpha / rank.")] = 32,
    dropout: Annotated[float, typer.Option(min=0.0, help="Of LoRA.")] = 0.0,
    targets: Annotated[
        str, typer.Option(help="Modules that get an adapter, comma-separated.")
    ] = "all-linear",
    lr: Annotated[float, typer.Option(help="AdamW's learning rate.")] = 2e-4,
    warmup: Annotated[int, typer.Option(min=0, help="Steps in which it rises.")] = 0,
    decay: Annotated[str, typer.Option(help="How it falls to 0: linear or cosine.")] = "linear",
    clip: Annotated[
        float, typer.Option(min=0.0, help="Most norm of a step's gradients; 0 allows any.")
    ] = 1.0,
    seed: Annotated[int, typer.Option(help="Of weights, order and dropout.")] = 0,
    evaluation: Annotated[
        Path | None,
        typer.Option("--eval", exists=True, dir_okay=False, help="Evaluate on this file."),
    ] = None,
    holdout: Annotated[
        int | None,
        typer.Option(
            min=0, help="Evaluate on the last documents of the data instead of training on them."
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
        bool, typer.Option("--resume", help="Go on from the newest checkpoint in --out.")
    ] = False,
    host_memory: Annotated[
        str | None, typer.Option(help="Most memory for what layers got, e.g. 8GB.")
    ] = None,
    spill: Annotated[
        Path | None,
        typer.Option(exists=True, file_okay=False, help="Where what is beyond that goes."),
    ] = None,
    dtype: ModelDtype = "auto",
    device: Annotated[str | None, typer.Option(help="A torch device.")] = None,
    json: JsonFlag = False,
) -> None:
    """Train a LoRA adapter on long texts, through the cache it will be served with."""
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
        f"{result['adapter']}: {result['steps']} steps, {result['tokens']:,} tokens, "
        f"{result['seconds']:.0f} s{losses} ({result['cache']})"
    )
