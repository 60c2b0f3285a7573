"""Counts lines of code, without blanks, comments and docstrings, in each package of kvkeep and of
kvkeep-lab, and names the longest files and functions, and the classes with the most members:

    python tools/count.py
"""

from __future__ import annotations

import ast
import tokenize
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCES = (ROOT / "src" / "kvkeep", ROOT / "lab" / "src" / "kvkeep_lab")
_NO_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    *(tokenize.ENCODING, tokenize.ENDMARKER),
}
_FORWARDS = {"OfPart"}  # descriptors that are members like methods and properties
_Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def tree_of(file: Path) -> ast.Module:
    """The parsed file."""
    return ast.parse(file.read_text())


def files() -> list[Path]:
    """All Python files of both packages."""
    return [file for source in SOURCES for file in sorted(source.rglob("*.py"))]


def place(file: Path) -> str:
    """The path of a file from the repository's root."""
    return file.relative_to(ROOT).as_posix()


def lines_of_code(file: Path) -> int:
    """How many lines of a Python file have code."""
    with file.open("rb") as text:
        found = {
            line
            for token in tokenize.tokenize(text.readline)
            if token.type not in _NO_CODE
            for line in range(token.start[0], token.end[0] + 1)
        }
    for node in ast.walk(tree_of(file)):
        if isinstance(node, ast.Module | ast.ClassDef | _Function):
            found -= _docstring(node)
    return len(found)


def _docstring(node: ast.Module | ast.ClassDef | _Function) -> set[int]:
    """The lines of a docstring."""
    first = node.body[0] if node.body else None
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
        return set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return set()


def functions() -> Iterator[tuple[str, int, int]]:
    """Every function, its lines without the docstring, and its parameters without `self`."""
    for file in files():
        for node in ast.walk(tree_of(file)):
            if isinstance(node, _Function):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1 - len(_docstring(node))
                given = node.args
                names = [one.arg for one in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
                count = len([name for name in names if name not in ("self", "cls")])
                yield f"{place(file)}: {node.name}", lines, count


def members() -> dict[str, int]:
    """The methods and properties of every class by inheritance from classes of both packages,
    dunder names not counted."""
    return {
        f"{place(file)}: {node.name}": len(_members(file, node.name))
        for file in files()
        for node in tree_of(file).body
        if isinstance(node, ast.ClassDef)
    }


@cache
def _members(file: Path, name: str) -> frozenset[str]:
    found = next(
        (x for x in tree_of(file).body if isinstance(x, ast.ClassDef) and x.name == name), None
    )
    if found is None:  # the file imports it
        home = _imports(file).get(name)
        return frozenset() if home is None or home[0] == file else _members(*home)
    own = {x.name for x in found.body if isinstance(x, _Function)}
    for x in found.body:
        if isinstance(x, ast.Assign) and isinstance(x.value, ast.Call):
            called = x.value.func
            called = called.value if isinstance(called, ast.Subscript) else called
            if isinstance(called, ast.Name) and called.id in _FORWARDS:
                own |= {target.id for target in x.targets if isinstance(target, ast.Name)}
    for base in found.bases:
        base = base.value if isinstance(base, ast.Subscript) else base
        if isinstance(base, ast.Name):
            own |= _members(file, base.id)
    return frozenset(x for x in own if not x.startswith("__"))


@cache
def _imports(file: Path) -> dict[str, tuple[Path, str]]:
    """The names that a file imports from both packages -> the file and the name there."""
    found = {}
    for node in ast.walk(tree_of(file)):
        if isinstance(node, ast.ImportFrom) and node.module:
            source = next((x for x in SOURCES if x.name == node.module.partition(".")[0]), None)
            if source is not None:
                home = source.parent.joinpath(*node.module.split("."))
                home = home / "__init__.py" if home.is_dir() else home.with_suffix(".py")
                if home.exists():
                    found |= {x.asname or x.name: (home, x.name) for x in node.names}
    return found


def main() -> None:
    """Print the counts."""
    longest = Counter[str]()
    for source in SOURCES:
        packages = Counter[str]()
        for file in source.rglob("*.py"):
            count = lines_of_code(file)
            packages["/".join(file.relative_to(source).parts[:-1]) or "(top level)"] += count
            longest[place(file)] = len(file.read_text().splitlines())
        print(f"{source.name:16}{packages.total():8,}")
        for name, count in packages.most_common():
            print(f"  {name:16}{count:6,}")
    _show("lines of the longest files, comments included", longest)
    _show("members of the largest classes", Counter(members()))
    _show("lines of the longest functions", Counter({name: n for name, n, _ in functions()}))
    _show("most parameters of a function", Counter({name: n for name, _, n in functions()}))


def _show(title: str, counts: Counter[str]) -> None:
    print(title)
    for name, count in counts.most_common(8):
        print(f"  {count:5,}  {name}")


if __name__ == "__main__":
    main()
