"""Text classification: a head predicts a text's class from its last token's hidden state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from kvkeep.finetune.data import Batch, DataError, Tokens, encoded, objects, text_of
from kvkeep.finetune.options import OptionError
from kvkeep.finetune.task import Task
from kvkeep.train.losses import IGNORED


def labelled(path: Path) -> list[tuple[str, str]]:
    """The texts and labels in a file.

    Raises:
        DataError: the file cannot be read, or a line has another form.
    """
    return objects(path, _labelled)


def labels_of(path: Path) -> list[str]:
    """The names of the classes in a file: numbers in ascending order, other names sorted.

    Raises:
        DataError: the file cannot be read, a line has another form, or there is only one class.
    """
    found = labelled(path)
    names = {label for _, label in found}
    if len(names) < 2:
        what = f"{path}: all {len(found)} texts have the label {found[0][1]!r}"
        raise DataError(f"{what}; give texts of at least two labels")
    numbers = all(name.isdecimal() for name in names)
    return sorted(names, key=lambda name: (int(name) if numbers else 0, name))


class Classes(Task):
    """Classification, with the class names from the model's config.

    The label of a text is at its last token, whose hidden state the model's head (`score`) reads;
    all other labels are -100. transformers reads the same token, so the result works there.

    Raises:
        OptionError: the model has no `score`, or no padding token.
    """

    def __init__(self, model: Any, tokenizer: Any, length: int) -> None:
        super().__init__(model, tokenizer, length)
        if not hasattr(model, "score"):
            what = f"{type(model).__name__} has no classification head (score)"
            raise OptionError(f"{what}; load it with AutoModelForSequenceClassification")
        if model.config.pad_token_id is None:
            what = "the model's config has no pad_token_id, which marks the end of a text"
            raise OptionError(f"{what}; set it to the tokenizer's")
        names = model.config.id2label
        self._labels = {str(names[index]): index for index in range(len(names))}
        self._pad: int = model.config.pad_token_id
        self.right = 0

    def read(self, path: Path) -> list[Tokens]:
        return objects(path, self._document)

    def _document(self, given: dict[str, Any]) -> Tokens:
        text, label = _labelled(given)
        if label not in self._labels:
            known = ", ".join(map(repr, list(self._labels)[:10]))
            raise DataError(f"label {label!r} is not one of the model's: {known}")
        ids = encoded(self._tokenizer, text, special=True)
        if not 2 <= len(ids) <= self.length:
            most = f"give 2 to {self.length}, or another --length"
            raise DataError(f"{len(ids)} tokens; texts with labels are not cut, so {most}")
        if int(ids[-1]) == self._pad:
            what = f"the text ends with the padding token {self._pad}"
            raise DataError(f"{what}, which a classifier ignores; remove it")
        labels = torch.full_like(ids, IGNORED)
        labels[-1] = self._labels[label]
        return Tokens(ids, labels)

    def pieces(self, documents: list[Tokens]) -> list[Tokens]:
        return documents

    def items(self, texts: list[Tokens]) -> int:
        return len(texts)

    def loss(self, model: Any, batch: Batch, items: int, *, everywhere: bool) -> dict[str, Any]:
        def head(hidden: Tensor, columns: slice) -> Tensor | None:
            labels = batch.labels[:, columns].to(hidden.device)
            rows, places = (labels != IGNORED).nonzero(as_tuple=True)
            if not len(rows) and not everywhere:
                return None
            logits = model.score(hidden[rows, places])
            classes = labels[rows, places]
            self.right = (self.right or 0) + int((logits.argmax(-1) == classes).sum())
            compute = torch.promote_types(logits.dtype, torch.float32)
            return cross_entropy(logits.to(compute), classes, reduction="sum") / items

        return {"head": head}


def _labelled(given: dict[str, Any]) -> tuple[str, str]:
    """The text and the label in a line."""
    if given.keys() != {"text", "label"}:
        raise DataError(f'an object of {sorted(given)}; give one with "text" and "label"')
    label = given["label"]
    if isinstance(label, int) and not isinstance(label, bool):
        label = str(label)
    return text_of(given["text"], '"text"'), text_of(label, '"label"')
