"""Tables that fit a terminal. Headings and cells are never truncated, but may be wrapped."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

_GAP = 2  # characters between columns
_TEXT = 14  # least width of a column with longer texts


def tables(title: str, rows: Sequence[Mapping[str, Any]], width: int) -> list[Table]:
    """Format rows with the same keys as a table; numbers have three significant digits, None is
    "-".

    Wide headings are wrapped between words, wide texts after punctuation. A table that is still too
    wide is divided into several tables, each with the first column.

    Args:
        width: the terminal's width in characters.
    """
    first, *others = (_Column(key, [row[key] for row in rows]) for key in rows[0])
    groups = [[first]]
    for column in others:
        if len(groups[-1]) > 1 and _total([*groups[-1], column]) > width:
            groups.append([first])
        groups[-1].append(column)
    return [_table(title if group is groups[0] else "", group, width) for group in groups]


class _Column:
    """A column's heading and cells, with its least and greatest width in characters."""

    def __init__(self, key: str, values: Sequence[Any]) -> None:
        self.heading = key.replace("_", " ")
        self.cells = [_cell(value) for value in values]
        self.is_text = any(isinstance(value, str) for value in values)
        widest = max(map(cell_len, self.cells))
        self.most = max(widest, cell_len(self.heading))
        words = max(map(cell_len, self.heading.split() or [""]))
        self.least = max(words, min(widest, _TEXT) if self.is_text else widest)


def _total(columns: Sequence[_Column]) -> int:
    """The least total width of columns, in characters."""
    return sum(column.least for column in columns) + _GAP * (len(columns) - 1)


def _table(title: str, columns: Sequence[_Column], width: int) -> Table:
    table = Table(
        title=Text(title) if title else None,
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, _GAP - 1, 0, 0),
    )
    spare = max(0, width - _total(columns))
    folded = []
    for column in columns:
        more = min(spare, column.most - column.least)
        spare -= more
        own = min(column.least + more, width)
        table.add_column(
            Text(_folded(column.heading, own)),
            justify="left" if column.is_text else "right",
            vertical="top",
            overflow="fold",
        )
        folded.append([Text(_folded(cell, own)) for cell in column.cells])
    for row in zip(*folded, strict=True):
        table.add_row(*row)
    return table


def _folded(text: str, width: int) -> str:
    """Wrap a text to lines of at most `width` characters, after punctuation if possible."""
    lines = [""]
    for piece in re.findall(r"(?:(?!\.\.)[^\s;,+@/(=])*(?:\.\.|[\s;,+@/(=])?", text):
        for start in range(0, len(piece), width):
            part = piece[start : start + width]
            if cell_len((lines[-1] + part).rstrip()) > width:
                lines.append("")
            lines[-1] += part
    return "\n".join(line.rstrip() for line in lines)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
