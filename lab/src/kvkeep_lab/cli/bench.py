"""`kvkeep bench`: measure kvkeep and other systems on the same tasks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvkeep.cli.complete import several_of, specs
from kvkeep.cli.errors import Group
from kvkeep.cli.output import JsonFlag, ModelWeights, examples, listed, say, whole_numbers
from kvkeep.cli.progress import Working
from kvkeep_lab.cli.bench_draw import draw as draw_recorded
from kvkeep_lab.cli.bench_options import (
    Beside,
    Device,
    Dtype,
    Host,
    Model,
    ModelOrRandom,
    SpecList,
    Turns,
    Ways,
    measured,
    names,
    numbers,
    show,
)
from kvkeep_lab.cli.bench_serve import serve
from kvkeep_lab.cli.plot import PlotFile
from kvkeep_lab.cli.plot import plot as draw

bench = typer.Typer(
    cls=Group,
    help="Measure kvkeep against other caches.",
    no_args_is_help=True,
    epilog=examples("kvkeep bench decode --plot decode.svg"),
)


@bench.command(epilog=examples("kvkeep bench append --tokens 256,4096"))
def append(
    tokens: Annotated[
        str | None,
        typer.Option(
            help="Tokens held, comma-separated; default: 256 to 4096, on CUDA 512 to 131072."
        ),
    ] = None,
    device: Device = None,
    batches: Annotated[
        str | None,
        typer.Option(help="Batch sizes, comma-separated; default: 1, on CUDA 1,8,32."),
    ] = None,
    layouts: Annotated[
        str | None,
        typer.Option(
            help="Of concat, growing and fixed, comma-separated; default: the first two, on CUDA "
            "all."
        ),
    ] = None,
    turns: Annotated[int, typer.Option(min=1, help="Rounds of ten calls each.")] = 20,
    plot: PlotFile = None,
    json: JsonFlag = False,
) -> None:
    """Append one token: concatenation against writing in place (8 heads, width 128)."""
    held, rows = numbers(tokens, "--tokens"), numbers(batches, "--batches")
    result = measured(
        "append", held, device=device, batches=rows, layouts=names(layouts), turns=turns
    )
    show("Append one token; ratios are concat / growing", result, plot, json)


@bench.command(epilog=examples('kvkeep bench memory --specs "keep_all;h2o:512;hf-dynamic"'))
def memory(
    model: Model = "smollm2-135m",
    dtype: Dtype = "float32",
    specs: Annotated[
        str | None,
        typer.Option(
            help="Cache specs, separated by semicolons, or hf-dynamic; default: exact caches, "
            "budgets and codecs.",
            show_default=False,
        ),
    ] = None,
    tokens: Annotated[int, typer.Option(min=2, help="Total tokens fed.")] = 2100,
    prompt: Annotated[int, typer.Option(min=2, help="Tokens of the prompt among them.")] = 1000,
    chunk: Annotated[
        int,
        typer.Option(min=1, help="Tokens of each chunk of the prompt, in the chunked runs."),
    ] = 500,
    plot: PlotFile = None,
    json: JsonFlag = False,
) -> None:
    """Resident memory of caches after a prompt and a long generation.

    It is compared with the live bytes in them and with transformers' DynamicCache. The prompt is
    fed at once and in chunks.
    """
    if prompt >= tokens:
        raise typer.BadParameter(f"--prompt {prompt} must be below --tokens {tokens}")
    if chunk >= prompt:
        raise typer.BadParameter(f"--chunk {chunk} must be below --prompt {prompt}")
    from kvkeep.spec import split_specs
    from kvkeep_lab.bench.memory import SPECS

    result = measured(
        "memory",
        model,
        dtype=dtype,
        tokens=tokens,
        prompt=prompt,
        chunk=chunk,
        specs=SPECS if specs is None else split_specs(specs),
    )
    show(f"Memory after {tokens} tokens, {model}, {dtype}", result, plot, json)


@bench.command(epilog=examples("kvkeep bench op --lengths 2048,32768 --codecs plain,int8"))
def op(
    device: Device = None,
    dtype: Dtype = "bfloat16",
    rows: Annotated[
        int | None,
        typer.Option(min=1, help="Batch size; default: 1, on CUDA 8.", show_default=False),
    ] = None,
    heads: Annotated[int, typer.Option(min=1, help="Query heads.")] = 32,
    kv_heads: Annotated[int, typer.Option(min=1, help="Key-value heads.")] = 8,
    head_dim: Annotated[int, typer.Option(min=1, help="Width of a head.")] = 128,
    queries: Annotated[str, typer.Option(help="New tokens of a call, comma-separated.")] = "1",
    lengths: Annotated[
        str | None,
        typer.Option(
            help="Tokens held, comma-separated; default: 256 to 32768, on CUDA 2048 to 131072."
        ),
    ] = None,
    codecs: Annotated[
        str | None,
        typer.Option(
            help="Codecs, each for both or as keys/values, comma-separated; default: plain, on "
            "CUDA also int8, int4 and fp8."
        ),
    ] = None,
    mass: Annotated[
        bool | None,
        typer.Option(help="Compute the attention mass too; default: no, on CUDA both."),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(
            help="Of torch-sdpa, torch-folded, torch-expanded, torch-math, flex, flash-attn and "
            "flashinfer, comma-separated; default: the first three, on CUDA all."
        ),
    ] = None,
    turns: Turns = 10,
    plot: PlotFile = None,
    json: JsonFlag = False,
) -> None:
    """The attention operation alone, on every backend and in other libraries."""
    held = numbers(lengths, "--lengths")
    if heads % kv_heads:
        raise typer.BadParameter(f"--heads {heads} must be a multiple of --kv-heads {kv_heads}")
    news = whole_numbers(queries, "--queries")
    from kvkeep.host.placement import dtype_named

    result = measured(
        "op",
        device=device,
        dtype=dtype_named(dtype),
        rows=rows,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        queries=news,
        lengths=held,
        codecs=names(codecs),
        masses=None if mass is None else [mass],
        against=names(against),
        turns=turns,
    )
    title = f"Attention of {queries} x {heads}/{kv_heads} heads, width {head_dim}, {dtype}; "
    reads = result.get("read_gb_per_s")
    does = f"reads at {reads:.0f}" if reads else f"copies at {result['copy_gb_per_s']:.0f}"
    show(title + f"memory {does} GB/s", result, plot, json)


@bench.command(epilog=examples("kvkeep bench linear --shapes 576x1536,1536x576"))
def linear(
    shapes: Annotated[
        str | None,
        typer.Option(
            help="Layers as INPUTSxOUTPUTS, comma-separated; default: the layers of SmolLM2-135M "
            "and of Llama 3.2 1B."
        ),
    ] = None,
    rows: Annotated[
        str | None,
        typer.Option(help="Numbers of rows, comma-separated; default: 1,2,4,8,16,32."),
    ] = None,
    dtype: Dtype = "bfloat16",
    turns: Turns = 10,
    plot: PlotFile = None,
    json: JsonFlag = False,
) -> None:
    """Linear layers of few rows on the CPU, by kvkeep's kernel and by torch."""
    sizes, counts = _shapes(shapes), numbers(rows, "--rows")
    from kvkeep.host.placement import dtype_named
    from kvkeep_lab.bench.linear import ROWS, SHAPES

    result = measured(
        "linear", shapes=sizes or SHAPES, rows=counts or ROWS, dtype=dtype_named(dtype), turns=turns
    )
    reads = f"memory reads at {result['read_gb_per_s']:.0f} GB/s"
    show(f"Linear layers of few rows, {dtype}; {reads}", result, plot, json)


@bench.command(epilog=examples("kvkeep bench decode --model random-1b --contexts 2048,8192"))
def decode(
    model: ModelOrRandom = "smollm2-135m",
    host: Host = "transformers",
    device: Device = None,
    dtype: Dtype = "bfloat16",
    weights: ModelWeights = None,
    contexts: Annotated[
        str | None,
        typer.Option(
            help="Tokens fed, comma-separated; default: 128,2048,7936, for a random model 2048 to "
            "131072."
        ),
    ] = None,
    specs: SpecList = "keep_all",
    ways: Ways = None,
    against: Annotated[
        str | None,
        typer.Option(
            help="Of hf-dynamic, hf-static (compiled) and llama.cpp, comma-separated; default: the "
            "first, on CUDA the first two. With --host litgpt: litgpt, its own cache."
        ),
    ] = None,
    turns: Annotated[int, typer.Option(min=1, help="Rounds of four steps each.")] = 10,
    beside: Beside = None,
    plot: PlotFile = None,
    json: JsonFlag = False,
) -> None:
    """Decode steps of a whole model at several contexts, and their time per token held."""
    held = numbers(contexts, "--contexts")
    busy = numbers(beside, "--beside", least=0)
    if busy is not None:
        if weights is not None:
            raise typer.BadParameter("--weights and --beside exclude each other; give one")
        with Working("decode beside others") as working:
            from kvkeep_lab.bench import beside as others

            result = others.run(model, dtype=dtype, ways=names(ways), beside=busy, progress=working)
        show(f"Generating with {model}, {dtype}, beside others", result, plot, json)
        return
    from kvkeep.spec import split_specs

    result = measured(
        "decode",
        model,
        host=host,
        device=device,
        dtype=dtype,
        weights=weights,
        contexts=held,
        specs=split_specs(specs),
        ways=names(ways),
        against=names(against),
        turns=turns,
    )
    show(f"One decode step of {model}, {dtype}", result, plot, json)
    floor = f"{result['bandwidth_floor_us_per_token']:.2f} to read the token's slots once"
    slopes = result["slope_us_per_token"].items()
    cost = ", ".join(f"{name} {slope:.2f}" for name, slope in slopes if slope is not None)
    if not json and cost:
        say(f"microseconds per token held: {cost}; {floor}")


@bench.command(epilog=examples("kvkeep bench prefill --lengths 2000,7900 --json > prefill.json"))
def prefill(
    model: Model = "smollm2-135m",
    dtype: Dtype = "float32",
    lengths: Annotated[str, typer.Option(help="Prompt lengths, comma-separated.")] = "2000,7900",
    turns: Turns = 3,
    plot: PlotFile = None,
    json: JsonFlag = False,
) -> None:
    """A whole prompt in one forward, compared with transformers and sdpa."""
    fed = whole_numbers(lengths, "--lengths")
    result = measured("prefill", model, dtype=dtype, lengths=fed, turns=turns)
    show(f"Prefill of {model}, {dtype}", result, plot, json)


@bench.command(epilog=examples('kvkeep bench save --specs "keep_all;keep_all+int8"'))
def save(
    model: Model = "smollm2-135m",
    dtype: Dtype = "float32",
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of the prompt.")] = 7900,
    specs: SpecList = "keep_all;keep_all+int8",
    directory: Annotated[
        Path | None, typer.Option(exists=True, file_okay=False, help="Directory for the files.")
    ] = None,
    turns: Turns = 5,
    plot: PlotFile = None,
    json: JsonFlag = False,
) -> None:
    """Saving a cache compared with copying its file, and loading it compared with a prefill."""
    from kvkeep.spec import split_specs

    result = measured(
        "save",
        model,
        dtype=dtype,
        tokens=tokens,
        specs=split_specs(specs),
        turns=turns,
        directory=directory,
    )
    show(f"The cache of {tokens} tokens, {model}, {dtype}", result, plot, json)


@bench.command(epilog=examples("kvkeep bench fork --tokens 4000 --forks 100"))
def fork(
    model: Model = "smollm2-135m",
    dtype: Dtype = "float32",
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of the prompt they share.")] = 4000,
    forks: Annotated[int, typer.Option(min=1, help="Caches that share it.")] = 100,
    new: Annotated[int, typer.Option(min=1, help="Tokens of each fork's own.")] = 32,
    rows: Annotated[int, typer.Option(min=2, help="Continuations in one batch.")] = 16,
    turns: Turns = 5,
    plot: PlotFile = None,
    json: JsonFlag = False,
) -> None:
    """Forks of one prompt: their memory, and a step of a batch with and without sharing."""
    result = measured(
        "fork", model, dtype=dtype, tokens=tokens, forks=forks, new=new, rows=rows, turns=turns
    )
    show(f"A batch that continues {tokens} tokens, {model}, {dtype}", result, plot, json)
    if not json:
        held, ratio = result["forks"]["bytes"], result["forks"]["ratio"]
        say(
            f"{forks} forks of {new} tokens: {held / 2**20:.0f} MiB, {ratio:.2f} times one cache "
            "and the new tokens"
        )


@bench.command(epilog=examples("kvkeep bench reuse --documents 6 --turns 3"))
def reuse(
    model: Model = "smollm2-135m",
    dtype: Dtype = "float32",
    documents: Annotated[int, typer.Option(min=2, help="Documents before the question.")] = 6,
    shortest: Annotated[int, typer.Option(min=1, help="Tokens of the shortest, at least.")] = 500,
    longest: Annotated[int, typer.Option(min=1, help="Tokens of the longest, at most.")] = 1000,
    answer: Annotated[int, typer.Option(min=1, help="Tokens over which quality is measured.")] = 64,
    turns: Annotated[int, typer.Option(min=1, help="Orders of the documents.")] = 3,
    redis: Annotated[
        str | None, typer.Option(help="URL of a Redis server; default: one is started.")
    ] = None,
    plot: PlotFile = None,
    json: JsonFlag = False,
) -> None:
    """Reuse of stored documents: time to the first token, and the loss of quality."""
    if shortest > longest:
        raise typer.BadParameter(f"--shortest {shortest} must be at most --longest {longest}")
    result = measured(
        "reuse",
        model,
        dtype=dtype,
        documents=documents,
        shortest=shortest,
        longest=longest,
        answer=answer,
        redis=redis,
        turns=turns,
    )
    if not any(row["mode"] == "redis" for row in result["rows"]):
        typer.echo("redis-server is not installed, so the redis mode is left out", err=True)
    title = f"{documents} documents and a question, {result['tokens']} tokens, {model}, {dtype}"
    show(title, result, plot, json)


@bench.command(epilog=examples("kvkeep bench train --tokens 2048,4096 --cache h2o:1024"))
def train(
    model: Model = "smollm2-135m",
    host: Host = "transformers",
    tokens: Annotated[
        str, typer.Option(help="Lengths of the text, comma-separated.")
    ] = "2048,4096,8192",
    cache: Annotated[
        str, typer.Option(help="kvkeep's cache spec.", autocompletion=specs)
    ] = "h2o:1024",
    chunk: Annotated[int, typer.Option(min=1, help="Tokens in each of kvkeep's chunks.")] = 1024,
    methods: Annotated[
        str,
        typer.Option(
            help="Methods, comma-separated.",
            autocompletion=several_of("kvkeep", "backprop", "checkpointing"),
        ),
    ] = "kvkeep,backprop,checkpointing",
    check: Annotated[bool, typer.Option(help="Compare the gradients too.")] = True,
    processes: Annotated[
        str, typer.Option(help="Numbers of processes that share kvkeep's text, comma-separated.")
    ] = "1",
    plot: PlotFile = None,
    json: JsonFlag = False,
) -> None:
    """One gradient of a long text's loss, compared with backprop and gradient checkpointing.

    It is the gradient with respect to all weights.
    """
    lengths, chosen = whole_numbers(tokens, "--tokens"), listed(methods, ",")
    shared = whole_numbers(processes, "--processes")
    if not chosen:
        raise typer.BadParameter("--methods is empty; give at least one, e.g. kvkeep")
    result = measured(
        "train",
        model,
        host=host,
        tokens=lengths,
        methods=chosen,
        cache=cache,
        chunk=chunk,
        check=check,
        processes=shared,
    )
    title = f"One gradient of {model}, float32, {cache}"
    if plot is not None:
        shown = ("method", "processes", "tokens", "peak_bytes", "seconds")
        rows = [{name: row[name] for name in shown} for row in result["rows"]]
        draw(title, {"": rows}, plot)
    show(title, result, None, json)


def _shapes(text: str | None) -> list[tuple[int, int]]:
    """ "64x32,64x64" -> pairs of (inputs, outputs)."""
    if text is None:
        return []
    pairs = [part.split("x") for part in text.split(",")]
    if not all(len(pair) == 2 and all(side.strip().isdigit() for side in pair) for pair in pairs):
        raise typer.BadParameter(f"--shapes {text}: give layers such as 576x1536,1536x576")
    return [(int(inputs), int(outputs)) for inputs, outputs in pairs]


bench.command(epilog=examples("kvkeep bench serve --sequences 1,16 --http"))(serve)
bench.command("draw", epilog=examples("kvkeep bench draw decode.json --plot decode.svg"))(
    draw_recorded
)
