"""`kvkeep eval`: the quality that cache specs lose, and the memory they save."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from json import loads
from pathlib import Path
from typing import Annotated, Any

import typer

from kvkeep.cli.complete import one_of, several_of
from kvkeep.cli.complete import specs as completed
from kvkeep.cli.output import (
    AdapterName,
    JsonFlag,
    ModelDtype,
    ModelName,
    listed,
    model_for,
    print_json,
    print_table,
    say,
    titled,
    whole_numbers,
)
from kvkeep.cli.progress import Working
from kvkeep_lab.cli.html import HtmlFile, check_html
from kvkeep_lab.cli.plot import PlotFile, plot_tradeoff
from kvkeep_lab.evals.names import PRESSES, TASKS

AGAINST = ("kvpress", "llama.cpp")
DEFAULT_SPECS = "keep_all;keep_all+int8;keep_all+int8/int4;window:512,sinks=4"


def evaluate(
    model: ModelName = None,
    adapter: AdapterName = None,
    specs: Annotated[
        str,
        typer.Option(
            help="Specs to compare with keep_all, separated by semicolons.",
            autocompletion=completed,
        ),
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
            "(needle, qa, reranking, ...), comma-separated.",
            autocompletion=several_of(*TASKS),
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
        typer.Option(
            help="kvpress: also compare its presses, in the environment of --kvpress; llama.cpp: "
            "its caches in 8, 5 and 4 bits.",
            autocompletion=one_of(*AGAINST),
        ),
    ] = None,
    kvpress: Annotated[
        Path | None, typer.Option(help="The directory that --setup-kvpress made.")
    ] = None,
    presses: Annotated[
        str | None,
        typer.Option(
            help="Presses of kvpress, comma-separated; default: all.",
            autocompletion=several_of(*PRESSES),
        ),
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
            help="Draw what earlier runs printed with --json, by --plot or --html, and stop; "
            "repeatable.",
        ),
    ] = None,
    plot: PlotFile = None,
    html: HtmlFile = None,
    json: JsonFlag = False,
) -> None:
    """Compare cache specs with the full cache on a text, and by tasks such as finding numbers.

    The figures on a text are perplexity and divergence. Each spec is fed the context, then the
    true continuation one token at a time.
    """
    check_html(html)
    if setup_kvpress is not None:
        with Working("kvpress") as working:
            from kvkeep_lab.evals.kvpress import install

            install(setup_kvpress, working)
        typer.echo(setup_kvpress)
        return
    if recorded:
        if plot is None and html is None:
            raise typer.BadParameter("--recorded needs --plot FILE or --html FILE to draw")
        _draw("Quality over the bytes held", *_recorded(recorded), plot, html)
        return
    if against not in (None, *AGAINST):
        raise typer.BadParameter(f"--against {against}: there is {' and '.join(AGAINST)}")
    if against == "kvpress" and kvpress is None:
        raise typer.BadParameter("--against kvpress needs --kvpress DIR; see --setup-kvpress")
    if samples_file is not None and not (retrieval and listed(tasks, ",")):
        raise typer.BadParameter("--samples-file without tasks would stay empty; give --tasks")
    model = model_for(model, adapter)
    contexts = whole_numbers(context, "--context")
    with Working("starting") as working:
        from kvkeep.environment import environment
        from kvkeep.spec import split_specs
        from kvkeep_lab.evals.kvpress import Kvpress
        from kvkeep_lab.evals.llama_cpp import LlamaCpp
        from kvkeep_lab.evals.run import run
        from kvkeep_lab.evals.tradeoff import rows_of

        some = PRESSES if presses is None else listed(presses, ",")
        other: Kvpress | LlamaCpp | None = LlamaCpp() if against == "llama.cpp" else None
        if against == "kvpress" and kvpress is not None:
            other = Kvpress(kvpress, some, kept)
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
            progress=working,
        )
        result["environment"] = environment()
    for one in result["skipped"]:
        say(f"skipped {one['task']}: {one['reason']}", err=True)
    for row in result.get("against", []):
        if "failed" in row:
            say(f"{row['spec']} failed: {row['failed']}", err=True)
    title = f"{titled(model, adapter)}, {dtype}, {windows * continuation:,} tokens predicted"
    shown = rows_of(result)
    every = list(dict.fromkeys(task for row in shown for task in row["tasks"]))
    print_table(title, [_columns(row, every) for row in shown], stderr=json)
    if json:
        print_json(result)
    _draw(title, shown, [result], plot, html)


def _draw(
    title: str,
    rows: Sequence[Mapping[str, Any]],
    results: Sequence[Mapping[str, Any]],
    plot: Path | None,
    html: Path | None,
) -> None:
    """Write the drawings that are asked for."""
    if plot is not None:
        plot_tradeoff(title, rows, plot)
    if html is not None:
        from kvkeep_lab.page.document import write
        from kvkeep_lab.page.evaluation import evaluation

        write(html, evaluation(title, rows, results))


def _recorded(files: Sequence[Path]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The rows of recorded runs, with the names of their models, and the runs.

    Raises:
        BadParameter: a file is no recorded run.
    """
    from kvkeep_lab.evals.tradeoff import rows_of

    rows, results = [], []
    for file in files:
        try:
            result = loads(file.read_text(encoding="utf-8").strip().splitlines()[-1])
            name = titled(result["model"], result.get("adapter"))
            rows += rows_of(result, f"{name}, {result['dtype']},")
        except (ValueError, IndexError, LookupError, AttributeError, TypeError) as error:
            raise typer.BadParameter(
                f"--recorded {file}: no result of kvkeep eval --json"
            ) from error
        results.append(result)
    return rows, results


def _columns(row: dict[str, Any], tasks: Sequence[str]) -> dict[str, Any]:
    """The columns of a row that the table shows, under names that fit a narrow terminal; those of
    tasks that were skipped at its context are None."""
    names = {"spec": "spec", "context": "context", "perplexity": "perplexity"}
    names |= {"perplexity_ratio": "ratio", "kl": "kl"}
    shown = {new: row[old] for old, new in names.items()}
    shown |= {"95%": "{:.2g}..{:.2g}".format(*row["kl_95"]), "top1": row["top1"]}
    for task in tasks:
        found = row["tasks"].get(task)
        shown[task] = found and "{accuracy:.2f} ({low:.2f}..{high:.2f})".format(**found)
    return shown | {"MiB": row["bytes"] / 2**20, "tokens/s": row["tokens_per_s"]}
