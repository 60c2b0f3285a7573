"""Writes the notebooks, each from the file that is its only source: `make notebooks`.

They are committed without outputs, which would differ from machine to machine.
"""

from __future__ import annotations

import re
from pathlib import Path
from posixpath import normpath, relpath

import jupytext
import nbformat

ROOT = Path(__file__).parent.parent
SOURCES = {
    "notebooks/tutorial.ipynb": "docs/tutorial.md",
    "notebooks/retrieval.ipynb": "examples/retrieval.py",
}

_LINK = re.compile(r"\]\(([^():#\s]+)(#[^()\s]*)?\)")


def notebook(source: str) -> str:
    """The notebook of a source, by its path in the repository, as text. The same source gives the
    same text."""
    name = "md" if source.endswith(".md") else "py:percent"
    book = jupytext.reads((ROOT / source).read_text(), fmt=name)
    folder = str(Path(source).parent)

    def moved(link: re.Match[str]) -> str:
        target = relpath(normpath(f"{folder}/{link[1]}"), "notebooks")
        return f"]({target}{link[2] or ''})"

    for index, cell in enumerate(book.cells):
        cell["id"] = f"cell-{index}"
        if cell.cell_type == "markdown":
            cell.source = _LINK.sub(moved, cell.source)
    book.metadata = nbformat.from_dict(
        {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        }
    )
    nbformat.validate(book)
    return nbformat.writes(book) + "\n"


def main() -> None:
    """Write all notebooks."""
    for target, source in SOURCES.items():
        (ROOT / target).write_text(notebook(source))
        print(target)


if __name__ == "__main__":
    main()
