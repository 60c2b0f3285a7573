"""`kvkeep eval`: the quality that cache specs lose, and the memory they save."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kvkeep.cli.output import (
    AdapterName,
    Advancing,
    JsonFlag,
    ModelDtype,
    ModelName,
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
    retrieval: Annotated[
        bool,
        typer.Option(help="Also test retrieval of hidden numbers, with five more prefills."),
    ] = True,
    late_question: Annotated[
        bool,
        typer.Option("--late-question", help="Ask for a number only when the text has been read."),
    ] = False,
    plot: PlotFile = None,
    json: JsonFlag = False,
) -> None:
    """Compare cache specs with the full cache on a text: perplexity, divergence and retrieval of
    hidden numbers.

    Each spec is fed the context, then the true continuation one token at a time.
    """
    check_plot(plot)
    model = model_for(model, adapter)
    contexts = whole_numbers(context)
    with reported(), Advancing("starting") as advancing:
        from kvkeep.bench.environment import environment
        from kvkeep.evals.run import run
        from kvkeep.spec import split_specs

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
            retrieve=retrieval,
            late_question=late_question,
            progress=advancing,
        )
        result["environment"] = environment()
    title = f"{titled(model, adapter)}, {dtype}, {windows * continuation:,} tokens predicted"
    shown = _with_baseline(result)
    if plot is not None:
        plot_tradeoff(title, shown, plot)
    print_table(title, [_columns(row, retrieval) for row in shown], stderr=json)
    if json:
        print_json(result)


def _with_baseline(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows, with the full cache's before those of each context unless its spec is among
    them."""
    rows = []
    for full in result["baseline"]:
        mine = [row for row in result["rows"] if row["context"] == full["context"]]
        rows += mine if any(row["spec"] == full["spec"] for row in mine) else [full, *mine]
    return rows


def _columns(row: dict[str, Any], retrieval: bool) -> dict[str, Any]:
    """The columns of a row that the table shows, under names that fit a narrow terminal."""
    names = {"spec": "spec", "context": "context", "perplexity": "perplexity"}
    names |= {"perplexity_ratio": "ratio", "kl": "kl", "top1": "top1"}
    names |= {"retrieval": "found"} if retrieval else {}
    shown = {new: row[old] for old, new in names.items()}
    return shown | {"MiB": row["bytes"] / 2**20, "tokens/s": row["tokens_per_s"]}
