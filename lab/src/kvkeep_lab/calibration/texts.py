"""Texts to calibrate with: the sources and docstrings of Python's standard library, or a file."""

from __future__ import annotations

import ast
import os
import random
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvkeep.errors import ShapeError
from kvkeep_lab.bench.text import windows_of_text

_PIECE = 8000  # most characters of one file in a row


def texts(tokenizer: Any, count: int, length: int, file: Path | None = None) -> Tensor:
    """`count` texts of `length` tokens, int64 (count, length), in no order.

    Args:
        file: UTF-8 text to take them from; None: Python's standard library, half of them sources,
            half docstrings. The help texts, which `kvkeep eval` reads, are not among them.

    Raises:
        ShapeError: there are not enough tokens.
    """
    if file is not None:
        found = windows_of_text(tokenizer, count, length, file)
        return found[torch.randperm(count, generator=torch.Generator().manual_seed(0))]
    first = tokenizer("").input_ids
    own = length - len(first)
    sources = (text[:_PIECE] for text in _files())
    kinds = [_windows(tokenizer, own, kind) for kind in (sources, _docstrings())]
    rows = []
    for index in range(count):
        row = next(kinds[index % 2], None)
        if row is None:
            raise ShapeError(
                f"{count} texts of {length} tokens, but the standard library has {index}; ask for "
                "fewer, or give a text of your own"
            )
        rows.append([*first, *row])
    return torch.tensor(rows)


def _windows(tokenizer: Any, length: int, pieces: Iterator[str]) -> Iterator[list[int]]:
    """Tokens of pieces of text, joined, `length` at a time."""
    held: list[int] = []
    for piece in pieces:
        held += tokenizer(piece + "\n\n", add_special_tokens=False, verbose=False).input_ids
        while len(held) >= length:
            yield held[:length]
            del held[:length]


def _files() -> list[str]:
    """The modules' sources, in an order that is always the same."""
    paths = sorted(Path(os.__file__).parent.glob("*.py"))
    random.Random(0).shuffle(paths)
    return [path.read_text(encoding="utf-8", errors="replace") for path in paths]


def _docstrings() -> Iterator[str]:
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef
    trees = map(ast.parse, _files())
    nodes = chain.from_iterable(map(ast.walk, trees))
    found = (ast.get_docstring(node) for node in nodes if isinstance(node, kinds))
    return (text for text in found if text and len(text) > 100)
