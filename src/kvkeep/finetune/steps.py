"""The steps of a run: which pieces each learns, in batches that are divided among processes."""

from __future__ import annotations

from typing import Any

from torch.utils.data import Dataset

from kvkeep.finetune.data import Tokens, batched, order
from kvkeep.finetune.options import Options
from kvkeep.finetune.processes import Processes
from kvkeep.finetune.task import Task


def turns(
    texts: list[Tokens], chunk: int | None, batch: int, task: Task, processes: Processes
) -> list[dict[str, Any]]:
    """What this process computes of texts, one batch after another.

    Returns:
        For each batch: the `batch`, None if only other processes have one; its `index` among all;
        `items`, the divisor of the summed losses of all texts; the `tokens` of all texts; and
        `chunk`, the tokens computed at once.
    """
    of_all = {
        "items": task.items(texts),
        "tokens": sum(len(text.ids) for text in texts),
        "chunk": chunk,
    }
    shared = processes.share(list(batched(texts, batch)))
    return [{"batch": own, "index": index, **of_all} for index, own in shared]


class Steps(Dataset[dict[str, Any]]):
    """The `turns` of all steps in their order. A step takes the next pieces in the epoch's order,
    and after its last piece the first ones of the next epoch."""

    def __init__(
        self, texts: list[Tokens], options: Options, task: Task, processes: Processes
    ) -> None:
        self._texts, self._options = texts, options
        self._task, self._processes = task, processes
        assert options.steps is not None
        self.turns = len(self._of(0))
        """The turns of each step but the last, which may have fewer."""
        self._length = (options.steps - 1) * self.turns + len(self._of(options.steps - 1))

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, place: int) -> dict[str, Any]:
        step, turn = divmod(place, self.turns)
        return self._of(step)[turn]

    def _of(self, step: int) -> list[dict[str, Any]]:
        options, count = self._options, len(self._texts)
        size = options.batch * options.accumulate
        stop = (step + 1) * size
        if options.epochs is not None:
            stop = min(stop, options.epochs * count)
        found = []
        for place in range(step * size, stop):
            epoch, index = divmod(place, count)
            found.append(self._texts[order(count, options.seed, epoch)[index]])
        chunk = options.chunk_of(step)
        return turns(found, chunk, options.batch, self._task, self._processes)
