"""Long real text: the help texts of Python's standard library, or a file."""

from __future__ import annotations

from pathlib import Path
from pydoc_data import topics
from typing import Any

import torch
from torch import Tensor

from kvkeep.errors import ShapeError


def tokens_of_text(tokenizer: Any, count: int) -> Tensor:
    """`count` tokens (1, count) of the standard library's help texts; see `windows_of_text`."""
    return windows_of_text(tokenizer, 1, count)


def windows_of_text(tokenizer: Any, count: int, length: int, file: Path | None = None) -> Tensor:
    """`count` windows of a text, which do not overlap and are spread evenly over it.

    Args:
        length: tokens of each window; includes the special tokens, if any, with which the tokenizer
            starts every text.
        file: UTF-8 text; None: the standard library's help texts.

    Returns:
        Token ids, int64 (count, length).

    Raises:
        ShapeError: the text is too short or not UTF-8.
    """
    first = tokenizer("").input_ids
    ids = tokenizer(_text(file), add_special_tokens=False, verbose=False).input_ids
    own = length - len(first)
    if len(ids) < count * own:
        raise ShapeError(
            f"{count} windows of {length} tokens, but the text has {len(ids)}; give a longer text, "
            "a smaller context, or fewer windows"
        )
    share = len(ids) / count
    starts = [int(index * share + (share - own) / 2) for index in range(count)]
    windows = [torch.tensor([*first, *ids[start : start + own]]) for start in starts]
    return torch.stack(windows).long()


def _text(file: Path | None) -> str:
    if file is None:
        return "\n".join(topics.topics.values())
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ShapeError(f"{file} is not UTF-8 text: {error}; convert it first") from None
