"""Tables on terminals of any width: nothing is cut."""

from __future__ import annotations

import pytest
from rich.console import Console

from kvkeep.cli.table import _folded, tables

SPECS = [
    "keep_all",
    "keep_all+int8",
    "keep_all+int4",
    "window:512,sinks=4",
    "full_attention=keep_all+kivi@growing;sliding_attention=window:512+int8@growing",
]
FIGURES = {"context": 2000, "perplexity": 12.3456, "ratio": 1.0, "kl": None, "top1": 0.994}
FIGURES |= {"found": 0.8, "MiB": 44.2, "tokens/s": 31.24}
MEMORY = {"tokens": 4100, "live_bytes": 123456789, "resident_bytes": 123456790, "chunked": True}
MEMORY |= {"peak_above_bytes": 1234567, "allocated_bytes": 99999999, "winner": "a [bold]name[/]"}


def printed(title, rows, width):
    """The lines of each table, without the spaces at their ends."""
    found = []
    for table in tables(title, rows, width):
        console = Console(width=width, color_system=None)
        with console.capture() as capture:
            console.print(table)
        lines = [line.rstrip() for line in capture.get().splitlines()]
        found.append([line for line in lines if not set(line) <= set("─ ")])
        assert max(map(len, lines)) <= width
    return found


@pytest.mark.parametrize("width", [40, 60, 80, 100, 200])
@pytest.mark.parametrize("figures", [FIGURES, MEMORY])
def test_nothing_is_cut(figures, width):
    rows = [{"spec": spec, **figures} for spec in SPECS]
    found = printed("", rows, width)
    text = "\n".join("\n".join(lines) for lines in found)
    for key in figures:
        assert all(word in text.split() for word in key.split("_"))
    assert "…" not in text
    for lines in found:  # the first column is in each of them
        column = "".join(line.partition("  ")[0] for line in lines)
        assert column.partition("spec")[2].startswith("".join(SPECS))


def test_what_fits_is_one_table():
    rows = [{"spec": spec, **FIGURES} for spec in SPECS[:4]]
    (lines,) = printed("a title", rows, 80)
    assert lines[0].strip() == "a title"
    assert lines[1].split() == ["spec", *FIGURES]
    assert lines[2].split() == [*("keep_all", "2,000", "12.3", "1", "-"), *lines[2].split()[5:]]
    assert len(printed("", rows, 60)) == 2


def test_markup_is_text():
    ((heading, row),) = printed("", [{"name": "[red]a[/red]", "n": 12345.6}], 40)
    assert heading.split() == ["name", "n"]
    assert row.split() == ["[red]a[/red]", "12,346"]


def test_a_range_is_broken_between_its_ends():
    assert _folded("8.2e-05..0.00023", 14) == "8.2e-05..\n0.00023"
