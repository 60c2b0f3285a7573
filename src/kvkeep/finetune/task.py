"""Tasks and their losses: next-token prediction here, classification in classify.py."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from kvkeep.finetune.data import Batch, DataError, Tokens, pieces, read
from kvkeep.finetune.options import OptionError


class Task(ABC):
    """A kind of data and its loss.

    Args:
        model: the model to train.
        tokenizer: the model's tokenizer.
        length: most tokens of a text or a piece of one.

    Attributes:
        right: number of correctly classified texts since this was last set to 0; None: no classes.
    """

    right: int | None = None

    def __init__(self, model: Any, tokenizer: Any, length: int) -> None:
        self._tokenizer, self.length = tokenizer, length

    @abstractmethod
    def read(self, path: Path) -> list[Tokens]:
        """The documents of a file.

        Raises:
            DataError: the file cannot be read, or a line has another form.
        """

    @abstractmethod
    def pieces(self, documents: list[Tokens]) -> list[Tokens]:
        """Training samples: the documents, or pieces of them that have a label to learn."""

    @abstractmethod
    def items(self, texts: list[Tokens]) -> int:
        """The divisor of the summed losses of texts."""

    @abstractmethod
    def loss(self, model: Any, batch: Batch, items: int, *, everywhere: bool) -> dict[str, Any]:
        """Arguments of `train.backward` that define the loss.

        Args:
            everywhere: whether every chunk must have a loss, if only zero.
        """


def divided(
    task: Task, data: Path, evaluation: Path | None, holdout: int | None
) -> tuple[list[Tokens], list[Tokens]]:
    """The pieces for training and the pieces for evaluation. Evaluation uses another file, or the
    last `holdout` documents (default: one if there are several).

    Raises:
        DataError: a file cannot be read, or has no label to learn.
        OptionError: there are not more documents than `holdout`.
    """
    documents = task.read(data)
    if evaluation is not None:
        held = task.read(evaluation)
    else:
        kept = min(1, len(documents) - 1) if holdout is None else holdout
        if not 0 <= kept < len(documents):
            what = f"a holdout of {kept} documents, but {data} has {len(documents)}"
            raise OptionError(f"{what}; use one of at most {len(documents) - 1}")
        cut = len(documents) - kept
        documents, held = documents[:cut], documents[cut:]
    train, tested = task.pieces(documents), task.pieces(held)
    for path, given, found in ((data, documents, train), (evaluation or data, held, tested)):
        if given and not found:
            what = f"{path}: nothing to learn in pieces of {task.length} tokens"
            raise DataError(f"{what}; give documents of 2 tokens or more, or a greater length")
    return train, tested


class NextToken(Task):
    """Language modelling: each learned token is predicted from the tokens before it."""

    def read(self, path: Path) -> list[Tokens]:
        return read(path, self._tokenizer)

    def pieces(self, documents: list[Tokens]) -> list[Tokens]:
        return pieces(documents, self.length)

    def items(self, texts: list[Tokens]) -> int:
        return sum(text.learned for text in texts)

    def loss(self, model: Any, batch: Batch, items: int, *, everywhere: bool) -> dict[str, Any]:
        return {"labels": batch.labels, "num_items": items}
