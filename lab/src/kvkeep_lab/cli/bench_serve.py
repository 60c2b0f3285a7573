"""`kvkeep bench serve`: many sequences at once, beside other systems."""

from __future__ import annotations

from typing import Annotated

import typer

from kvkeep.cli.output import JsonFlag, whole_numbers
from kvkeep.cli.progress import Working
from kvkeep_lab.cli.bench_options import Device, Dtype, ModelOrRandom, SpecList, names, show
from kvkeep_lab.cli.plot import PlotFile


def serve(
    model: ModelOrRandom = "smollm2-135m",
    device: Device = None,
    dtype: Dtype = "bfloat16",
    sequences: Annotated[
        str, typer.Option(help="Numbers of sequences, comma-separated.")
    ] = "1,4,16,64",
    specs: SpecList = "keep_all",
    against: Annotated[
        str | None,
        typer.Option(
            help="Of kvkeep alone (one after the other), kvkeep compiled, transformers padded, "
            "transformers generate_batch (its continuous batching), llama.cpp, and llama.cpp "
            "unified (one buffer), comma-separated; default: all but llama.cpp, and none in other "
            "measurements.",
            show_default=False,
        ),
    ] = None,
    http: Annotated[
        bool, typer.Option("--http", help="Measure `kvkeep serve` too, through HTTP streams.")
    ] = False,
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each answer.")] = 64,
    arrivals: Annotated[
        str, typer.Option(help="How prompts arrive, comma-separated.")
    ] = "at once,poisson",
    rate: Annotated[
        float | None,
        typer.Option(
            min=1e-3,
            help="Prompts per second that arrive in poisson; default: as many as kvkeep completes "
            "per second when they come at once.",
            show_default=False,
        ),
    ] = None,
    shortest: Annotated[int, typer.Option(min=1, help="Tokens of the shortest prompt.")] = 200,
    longest: Annotated[int, typer.Option(min=1, help="Tokens of the longest prompt.")] = 1400,
    shared_prefix: Annotated[
        int, typer.Option(min=0, help="Tokens before them with which all prompts begin.")
    ] = 0,
    interrupt: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Measure how long a prompt of this many tokens delays the other sequences.",
        ),
    ] = None,
    cpu_time: Annotated[
        bool,
        typer.Option(
            "--cpu-time",
            help="Measure the processor time of one thread per step.",
        ),
    ] = False,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds of measurement.")] = 3,
    plot: PlotFile = None,
    json: JsonFlag = False,
) -> None:
    """Many sequences at once: throughput, delays and memory."""
    if shortest > longest:
        raise typer.BadParameter(f"--shortest {shortest} must be at most --longest {longest}")
    if cpu_time and interrupt is not None:
        raise typer.BadParameter("--cpu-time and --interrupt exclude each other; give one")
    counts, others = whole_numbers(sequences, "--sequences"), names(against)
    with Working("serve") as working:
        from kvkeep.spec import split_specs
        from kvkeep_lab.bench import serve_steps
        from kvkeep_lab.bench.contenders import SERVER
        from kvkeep_lab.bench.serve import AGAINST, ServeOptions, run

        if others is None:
            others = [] if cpu_time or interrupt is not None else list(AGAINST)
        asked = ServeOptions(
            model,
            device,
            dtype,
            counts,
            split_specs(specs),
            [*others, SERVER] if http else others,
            shared_prefix,
            shortest,
            longest,
        )
        about = f"{model}, {dtype}"
        if cpu_time:
            title = f"Processor time of one step, one thread, {about}"
            result = serve_steps.cpu_time(asked, turns=repeats, progress=working)
        elif interrupt is not None:
            title = f"Beside a prompt of {interrupt} tokens, {about}"
            result = serve_steps.interrupted(asked, interrupt, repeats=repeats, progress=working)
        else:
            title = f"Answers of {new_tokens} tokens, {about}"
            result = run(
                asked,
                new_tokens=new_tokens,
                arrivals=names(arrivals) or (),
                rate=rate,
                repeats=repeats,
                progress=working,
            )
    show(title, result, plot, json)
