"""Tasks on a long prompt: does a model still find, follow, count and use what a prompt says? All
texts are made here, from the kinds of benchmarks whose data would have to be downloaded."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from kvkeep_lab.checks import require_known
from kvkeep_lab.evals import names
from kvkeep_lab.evals.prompts import Frame, Prompt
from kvkeep_lab.evals.recipes import helmet, longbench, ruler

TASKS = ruler.TASKS | longbench.TASKS | helmet.TASKS
"""Every task by its name."""

GROUPS = names.GROUPS | {"all": tuple(TASKS)}
"""The names of the tasks of each group."""


def prompts(
    task: str, tokenizer: Any, text: Tensor, length: int, samples: int = 5, seed: int = 0
) -> list[Prompt]:
    """A task's prompts, formatted as a chat if the tokenizer has a chat template.

    Args:
        text: token ids (n,) of a window of text, at least `length`, in which sentences are hidden.
        length: tokens of a prompt; most tasks take at most this many, to end with a whole word,
            passage or example.
        seed: determines all random choices: numbers, names, words, examples.

    Raises:
        ShapeError: the length leaves no room for it.
        UnsupportedError: `code-completion` finds no source code.
    """
    kind = TASKS[task]
    frame = Frame(tokenizer, length, task, kind, seed)
    depths = [10 + round(80 * i / (samples - 1)) if samples > 1 else 50 for i in range(samples)]
    if kind.make is None:
        return ruler.needles(frame, text, depths, random.Random(seed))
    draws = (random.Random(f"{task} {seed} {index}") for index in range(samples))
    return [kind.make(frame, text, draw, at) for draw, at in zip(draws, depths, strict=True)]


def chosen(asked: Sequence[str]) -> list[str]:
    """The tasks of these names of tasks and groups, each once.

    Raises:
        SpecError: a name is unknown.
    """
    require_known("task", asked, (*TASKS, *GROUPS))
    return list(dict.fromkeys(task for name in asked for task in GROUPS.get(name, (name,))))
