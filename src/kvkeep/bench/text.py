"""Long real text that every Python carries."""

from __future__ import annotations

from pydoc_data import topics
from typing import Any

from torch import Tensor

from kvkeep.errors import ShapeError


def tokens_of_text(tokenizer: Any, count: int) -> Tensor:
    """The first `count` tokens (1, count) of the standard library's help texts.

    Raises:
        ShapeError: the texts have fewer.
    """
    text = "\n".join(topics.topics.values())
    ids: Tensor = tokenizer(text, return_tensors="pt", verbose=False).input_ids
    if ids.shape[1] < count:
        raise ShapeError(f"{count} tokens of text, but there are {ids.shape[1]}; ask for fewer")
    return ids[:, :count]
