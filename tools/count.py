"""Counts lines of code, without blanks, comments and docstrings, in each package of kvkeep and of
kvkeep-lab, and names the longest files:

    python tools/count.py
"""

from __future__ import annotations

import ast
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCES = (ROOT / "src" / "kvkeep", ROOT / "lab" / "src" / "kvkeep_lab")
_NO_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    *(tokenize.ENCODING, tokenize.ENDMARKER),
}


def lines_of_code(file: Path) -> int:
    """How many lines of a Python file have code."""
    with file.open("rb") as text:
        found = {
            line
            for token in tokenize.tokenize(text.readline)
            if token.type not in _NO_CODE
            for line in range(token.start[0], token.end[0] + 1)
        }
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                found -= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return len(found)


def main() -> None:
    """Print the counts."""
    longest = Counter[str]()
    for source in SOURCES:
        packages = Counter[str]()
        for file in source.rglob("*.py"):
            count, place = lines_of_code(file), file.relative_to(source)
            packages["/".join(place.parts[:-1]) or "(top level)"] += count
            longest[str(file.relative_to(ROOT))] = len(file.read_text().splitlines())
        print(f"{source.name:16}{packages.total():8,}")
        for name, count in packages.most_common():
            print(f"  {name:16}{count:6,}")
    print("lines of the longest files, comments included")
    for file, count in longest.most_common(8):
        print(f"  {count:5,}  {file}")


if __name__ == "__main__":
    main()
