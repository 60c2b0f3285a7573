"""Options of an evaluation and of its command."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvkeep.options import option
from kvkeep_lab.evals.names import TASKS
from kvkeep_lab.options import names, numbers, text_file


@dataclass(frozen=True)
class EvalOptions:
    """The texts and the tasks of an evaluation.

    Args:
        contexts: how many tokens are fed before the first that is predicted; also the length of the
            tasks' prompts.
        continuation: how many tokens are predicted.
        windows: how many windows of the text the figures are averaged over.
        chunk: feed the context in chunks of that many tokens; None: all at once.
        text_file: a file of UTF-8 text; None: the standard library's help texts.
        tasks: names in `kvkeep_lab.evals.tasks.TASKS` and `GROUPS`; `needle` hides numbers and asks
            for them. Each takes `samples` more prefills per window. A task that does not fit a
            context is skipped there.
        samples: prompts of each task per window; those of `needle` hide their number at as many
            places, from 10 to 90 % of the text.
        late_question: feed the question when the text has been read, so that what is evicted until
            then cannot depend on it. `kvzip` is always evaluated so.
    """

    contexts: Sequence[int] = numbers(
        (2000,), "Tokens fed before the continuation, comma-separated.", name="--context"
    )
    continuation: int = option(256, "Tokens predicted.", min=1)
    windows: int = option(1, "Excerpts of the text to average over.", min=1)
    chunk: int | None = option(None, "Feed the context in chunks of this many tokens.", min=1)
    text_file: Path | None = text_file()
    tasks: Sequence[str] = names(
        ("needle",),
        "Groups of tasks (ruler, longbench, helmet, or all of them: all) or single ones (needle, "
        "qa, reranking, ...), comma-separated.",
        values=TASKS,
    )
    samples: int = option(5, "Prompts of each task for each window; each is a prefill.", min=1)
    late_question: bool = option(False, "Ask only when the text has been read.", flag=True)


__all__ = ["EvalOptions"]
