"""`kvkeep eval`: the quality that cache specs lose, and the memory they save."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from json import loads
from pathlib import Path
from typing import Any

import typer

from kvkeep.cli import output
from kvkeep.cli.options import ModelOptions, with_options
from kvkeep.cli.progress import Working
from kvkeep.options import option
from kvkeep_lab.cli.plot import HtmlFile, PlotFile, plot_tradeoff
from kvkeep_lab.evals.names import PRESSES
from kvkeep_lab.evals.options import EvalOptions
from kvkeep_lab.options import names, spec_list

AGAINST = ("kvpress", "llama.cpp")


@dataclass(frozen=True)
class Eval(EvalOptions, ModelOptions):
    """Options of `kvkeep eval`."""

    specs: Sequence[str] = spec_list(
        ("keep_all", "keep_all+int8", "keep_all+int8/int4", "window:512,sinks=4"),
        "Specs to compare with keep_all, separated by semicolons.",
    )
    samples_file: Path | None = option(
        None, "Write each answer to this file when it is known: JSON Lines.", dir_okay=False
    )
    overwrite: bool = option(False, "Replace a --samples-file that exists.", flag=True)
    retrieval: bool = option(
        True, "Without it no task is tested.", name="--retrieval/--no-retrieval"
    )
    against: str | None = option(
        None,
        "kvpress: also compare its presses, in the environment of --kvpress; llama.cpp: its "
        "caches in 8, 5 and 4 bits.",
        values=AGAINST,
    )
    kvpress: Path | None = option(None, "The directory of a virtual environment with kvpress.")
    presses: Sequence[str] = names(
        PRESSES,
        "Presses of kvpress, comma-separated; default: all.",
        values=PRESSES,
        show_default=False,
    )
    kept: float = option(0.25, "Share of the keys and values that presses keep.")
    recorded: list[Path] | None = option(
        None,
        "Draw what earlier runs printed with --json, by --plot or --html, and stop; repeatable.",
        exists=True,
        dir_okay=False,
    )

    def settings(self) -> dict[str, Any]:
        """Arguments of `kvkeep_lab.evals.run.run`.

        Raises:
            BadParameter: options do not fit together.
        """
        if self.against not in (None, *AGAINST):
            raise typer.BadParameter(f"--against {self.against}: there is {' and '.join(AGAINST)}")
        if self.against == "kvpress" and self.kvpress is None:
            raise typer.BadParameter("--against kvpress needs --kvpress DIR, where kvpress is")
        tasks = self.tasks if self.retrieval else []
        if self.samples_file is not None and not tasks:
            raise typer.BadParameter("--samples-file without tasks would stay empty; give --tasks")
        other: Any = None
        if self.kvpress is not None and self.against == "kvpress":
            from kvkeep_lab.evals.kvpress import Kvpress

            other = Kvpress(self.kvpress, self.presses, self.kept)
        elif self.against is not None:
            from kvkeep_lab.evals.llama_cpp import LlamaCpp

            other = LlamaCpp()
        given = self.some(*(one.name for one in fields(EvalOptions)))
        given |= self.some("adapter", "specs", "dtype", "samples_file", "overwrite")
        given |= {"model": self.named, "context": given.pop("contexts")}
        return given | {"tasks": tasks, "against": other}


@with_options(Eval)
def evaluate(
    asked: Eval, plot: PlotFile = None, html: HtmlFile = None, json: output.JsonFlag = False
) -> None:
    """Compare cache specs with the full cache on a text, and by tasks such as finding numbers.

    The figures on a text are perplexity and divergence. Each spec is fed the context, then the
    true continuation one token at a time.
    """
    if asked.recorded:
        if plot is None and html is None:
            raise typer.BadParameter("--recorded needs --plot FILE or --html FILE to draw")
        _draw("Quality over the bytes held", *_recorded(asked.recorded), plot, html)
        return
    with Working("starting") as working:
        settings = asked.settings()
        from kvkeep.environment import environment
        from kvkeep_lab.evals.run import run
        from kvkeep_lab.evals.tradeoff import rows_of

        result = run(**settings, progress=working) | {"environment": environment()}
    for one in result["skipped"]:
        output.say(f"skipped {one['task']}: {one['reason']}", err=True)
    for row in result.get("against", []):
        if "failed" in row:
            output.say(f"{row['spec']} failed: {row['failed']}", err=True)
    predicted = f"{asked.windows * asked.continuation:,} tokens predicted"
    title = f"{asked.title}, {asked.dtype}, {predicted}"
    shown = rows_of(result)
    every = list(dict.fromkeys(task for row in shown for task in row["tasks"]))
    output.print_table(title, [_columns(row, every) for row in shown], stderr=json)
    if json:
        output.print_json(result)
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
            name = output.titled(result["model"], result.get("adapter"))
            rows += rows_of(result, f"{name}, {result['dtype']},")
        except (ValueError, IndexError, LookupError, AttributeError, TypeError) as error:
            raise typer.BadParameter(
                f"--recorded {file}: no result of kvkeep eval --json"
            ) from error
        results.append(result)
    return rows, results


def _columns(row: dict[str, Any], tasks: Sequence[str]) -> dict[str, Any]:
    """The columns of a row that the table shows, under names that fit a narrow terminal; None for
    tasks that were skipped at its context."""
    shown = {name: row[name] for name in ("spec", "context", "perplexity")}
    shown |= {"ratio": row["perplexity_ratio"], "kl": row["kl"]}
    shown |= {"95%": "{:.2g}..{:.2g}".format(*row["kl_95"]), "top1": row["top1"]}
    for task in tasks:
        found = row["tasks"].get(task)
        shown[task] = found and "{accuracy:.2f} ({low:.2f}..{high:.2f})".format(**found)
    return shown | {"MiB": row["bytes"] / 2**20, "tokens/s": row["tokens_per_s"]}
