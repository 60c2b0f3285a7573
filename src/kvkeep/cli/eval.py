"""`kvkeep eval`: the quality that cache specs lose, and the memory they save."""

from __future__ import annotations

from collections.abc import Sequence
from json import loads
from pathlib import Path
from typing import Annotated, Any

import typer

from kvkeep.cli.output import (
    AdapterName,
    Advancing,
    JsonFlag,
    ModelDtype,
    ModelName,
    Working,
    listed,
    model_for,
    print_json,
    print_table,
    reported,
    titled,
    whole_numbers,
)
from kvkeep.cli.plot import PlotFile, check_plot, plot_tradeoff

DEFAULT_SPECS = "keep_all;keep_all+int8;keep_all+int8/int4;window:512,sinks=4"


def evaluate(
    model: ModelName = None,
    adapter: AdapterName = None,
    specs: Annotated[
        str, typer.Option(help="Specs to compare with keep_all, separated by semicolons.")
    ] = DEFAULT_SPECS,
    dtype: ModelDtype = "auto",
    context: Annotated[
        str, typer.Option(help="Tokens fed before the continuation, comma-separated.")
    ] = "2000",
    continuation: Annotated[int, typer.Option(min=1, help="Tokens predicted.")] = 256,
    windows: Annotated[int, typer.Option(min=1, help="Excerpts of the text to average over.")] = 1,
    chunk: Annotated[
        int | None, typer.Option(min=1, help="Feed the context in chunks of this many tokens.")
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="Use this UTF-8 text instead."),
    ] = None,
    tasks: Annotated[
        str,
        typer.Option(
            help="Groups of tasks (ruler, longbench, helmet, or all of them: all) or single ones "
            "(needle, qa, reranking, ...), comma-separated."
        ),
    ] = "needle",
    samples: Annotated[
        int, typer.Option(min=1, help="Prompts of each task for each window; each is a prefill.")
    ] = 5,
    retrieval: Annotated[
        bool, typer.Option("--retrieval/--no-retrieval", help="Without it no task is tested.")
    ] = True,
    late_question: Annotated[
        bool,
        typer.Option("--late-question", help="Ask only when the text has been read."),
    ] = False,
    samples_file: Annotated[
        Path | None,
        typer.Option(
            dir_okay=False, help="Write each answer to this file when it is known: JSON Lines."
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a --samples-file that exists.")
    ] = False,
    against: Annotated[
        str | None,
        typer.Option(help="kvpress: also compare its presses, in the environment of --kvpress."),
    ] = None,
    kvpress: Annotated[
        Path | None, typer.Option(help="The directory that --setup-kvpress made.")
    ] = None,
    presses: Annotated[
        str | None, typer.Option(help="Presses of kvpress, comma-separated; default: all.")
    ] = None,
    kept: Annotated[
        float, typer.Option(help="Share of the keys and values that presses keep.")
    ] = 0.25,
    setup_kvpress: Annotated[
        Path | None,
        typer.Option(help="Make an environment with kvpress in this directory, and stop."),
    ] = None,
    recorded: Annotated[
        list[Path] | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="Draw what earlier runs printed with --json, by --plot, and stop; repeatable.",
        ),
    ] = None,
    plot: PlotFile = None,
    json: JsonFlag = False,
) -> None:
    """Compare cache specs with the full cache on a text: perplexity, divergence, and tasks such as
    finding hidden numbers.

    Each spec is fed the context, then the true continuation one token at a time.
    """
    check_plot(plot)
    if setup_kvpress is not None:
        with reported(), Working("kvpress") as working:
            from kvkeep.evals.kvpress import install

            install(setup_kvpress, working)
        typer.echo(setup_kvpress)
        return
    if recorded:
        if plot is None:
            raise typer.BadParameter("--recorded needs --plot FILE, which is drawn from it")
        plot_tradeoff("Quality over the bytes held", _read(recorded), plot)
        return
    if against not in (None, "kvpress"):
        raise typer.BadParameter(f"--against {against}: there is kvpress")
    if against and kvpress is None:
        raise typer.BadParameter("--against kvpress needs --kvpress DIR; see --setup-kvpress")
    if samples_file is not None and not (retrieval and listed(tasks, ",")):
        raise typer.BadParameter("--samples-file without tasks would stay empty; give --tasks")
    model = model_for(model, adapter)
    contexts = whole_numbers(context)
    with reported(), Advancing("starting") as advancing:
        from kvkeep.bench.environment import environment
        from kvkeep.evals.kvpress import PRESSES, Kvpress
        from kvkeep.evals.run import run
        from kvkeep.spec import split_specs

        some = PRESSES if presses is None else listed(presses, ",")
        other = None if against is None or kvpress is None else Kvpress(kvpress, some, kept)
        result = run(
            model,
            adapter=adapter,
            dtype=dtype,
            context=contexts,
            continuation=continuation,
            specs=split_specs(specs),
            windows=windows,
            chunk=chunk,
            text_file=text,
            tasks=listed(tasks, ",") if retrieval else [],
            samples=samples,
            late_question=late_question,
            samples_file=samples_file,
            overwrite=overwrite,
            against=other,
            progress=advancing,
        )
        result["environment"] = environment()
    others = result.get("against", [])
    for row in others:
        if "failed" in row:
            typer.echo(f"{row['spec']} failed: {row['failed']}", err=True)
    title = f"{titled(model, adapter)}, {dtype}, {windows * continuation:,} tokens predicted"
    shown = _with_baseline(result) + [row for row in others if "failed" not in row]
    if plot is not None:
        plot_tradeoff(title, shown, plot)
    print_table(title, [_columns(row) for row in shown], stderr=json)
    if json:
        print_json(result)


def _read(files: Sequence[Path]) -> list[dict[str, Any]]:
    """The rows of recorded runs, with the names of their models.

    Raises:
        BadParameter: a file is no recorded run.
    """
    rows = []
    for file in files:
        try:
            result = loads(file.read_text(encoding="utf-8").strip().splitlines()[-1])
            more = [row for row in result.get("against", []) if "failed" not in row]
            of = {"model": f"{result['model']}, {result['dtype']},"}
            rows += [{**row, **of} for row in _with_baseline(result) + more]
        except (ValueError, IndexError, LookupError, AttributeError, TypeError) as error:
            raise typer.BadParameter(
                f"--recorded {file}: no result of kvkeep eval --json"
            ) from error
    return rows


def _with_baseline(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows, with the full cache's before those of each context unless its spec is among
    them."""
    rows = []
    for full in result["baseline"]:
        mine = [row for row in result["rows"] if row["context"] == full["context"]]
        rows += mine if any(row["spec"] == full["spec"] for row in mine) else [full, *mine]
    return rows


def _columns(row: dict[str, Any]) -> dict[str, Any]:
    """The columns of a row that the table shows, under names that fit a narrow terminal."""
    names = {"spec": "spec", "context": "context", "perplexity": "perplexity"}
    names |= {"perplexity_ratio": "ratio", "kl": "kl"}
    shown = {new: row[old] for old, new in names.items()}
    shown |= {"95%": "{:.2g}..{:.2g}".format(*row["kl_95"]), "top1": row["top1"]}
    for task, found in row["tasks"].items():
        shown[task] = "{accuracy:.2f} ({low:.2f}..{high:.2f})".format(**found)
    return shown | {"MiB": row["bytes"] / 2**20, "tokens/s": row["tokens_per_s"]}
