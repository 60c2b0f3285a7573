"""Python's standard library as a repository: its definitions, and lines that use definitions of
other files."""

from __future__ import annotations

import ast
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path

from kvkeep.errors import UnsupportedError

_PACKAGES = ("asyncio", "concurrent/futures", "email", "json", "logging", "unittest", "urllib")
_LINES = 12  # most lines of a definition, and of the code before a line
_FEWEST = 2  # lines of a function before a line
_WIDTH = range(16, 90)  # of a line, in characters
_SIMPLE = (ast.Assign, ast.AugAssign, ast.Expr, ast.Raise, ast.Return)


@dataclass(frozen=True)
class Definition:
    """The first lines of a function or class, after the name of its file."""

    file: Path
    text: str


@dataclass(frozen=True)
class Gap:
    """A line of code that uses a definition of another file, without its indentation of so many
    spaces, and the import and the lines before it."""

    file: Path
    before: str
    indentation: int
    line: str
    definition: Definition

    def others(self) -> tuple[list[Definition], list[Definition]]:
        """Definitions of other files without this line: of the same package, and of other
        packages."""
        near, far = list[Definition](), list[Definition]()
        for one in chain.from_iterable(some.values() for some in _definitions().values()):
            if one != self.definition and one.file != self.file and self.line not in one.text:
                (near if one.file.parent == self.file.parent else far).append(one)
        return near, far


@cache
def gaps() -> tuple[Gap, ...]:
    """All gaps.

    Raises:
        UnsupportedError: this Python has no sources of its standard library.
    """
    found = tuple(gap for file in _files() for gap in _gaps_of(file))
    if not found:
        raise UnsupportedError(
            f"no sources of Python's standard library in {_root()}; leave out the task "
            "code-completion"
        )
    return found


def _root() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def _files() -> list[Path]:
    """The modules, relative to the library's root."""
    root = _root()
    return [
        file.relative_to(root)
        for package in _PACKAGES
        for file in sorted((root / package).glob("*.py"))
        if file.stem != "__main__"
    ]


@cache
def _parsed(file: Path) -> tuple[list[str], ast.Module]:
    """A module's lines, and the same as a tree."""
    source = (_root() / file).read_text(encoding="utf-8")
    return source.splitlines(), ast.parse(source)


@cache
def _definitions() -> dict[Path, dict[str, Definition]]:
    """The functions and classes of all modules, by file and name."""
    return {file: _definitions_of(file) for file in _files()}


def _definitions_of(file: Path) -> dict[str, Definition]:
    (lines, tree), found = _parsed(file), {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            last = min(node.end_lineno or node.lineno, node.lineno + _LINES - 1)
            code = "\n".join(lines[node.lineno - 1 : last])
            found[node.name] = Definition(file, f"# {file.as_posix()}\n{code}")
    return found


def _gaps_of(file: Path) -> Iterable[Gap]:
    lines, tree = _parsed(file)
    imported, found = _imported(file, tree), dict[int, Gap]()
    for function in ast.walk(tree):  # inner functions come later, and replace gaps of outer ones
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for statement in ast.walk(function):
            if not isinstance(statement, _SIMPLE) or statement.lineno != statement.end_lineno:
                continue
            place = statement.lineno - 1
            code, line = _before(function, place, lines), lines[place].strip()
            names = (node.id for node in ast.walk(statement) if isinstance(node, ast.Name))
            used = next((imported[name] for name in names if name in imported), None)
            if used is None or not code or len(line) not in _WIDTH:
                continue
            definition, importing = used
            before = f"# {file.as_posix()}\n{importing}\n\n{code}"
            if line not in before + definition.text:
                indentation = len(lines[place]) - len(lines[place].lstrip())
                found[place] = Gap(file, before, indentation, line, definition)
    return found.values()


def _before(function: ast.FunctionDef | ast.AsyncFunctionDef, place: int, lines: list[str]) -> str:
    """The head of a function and its newest lines before a place, without its docstring; nothing if
    these lines are too few."""
    first = function.body[0]
    docstring = ast.get_docstring(function, clean=False) is not None
    start = (first.end_lineno or first.lineno) if docstring else first.lineno - 1
    newest = lines[max(start, place - _LINES) : place]
    if sum(bool(line.strip()) for line in newest) < _FEWEST:
        return ""
    left_out = [" " * first.col_offset + "..."] if start < place - _LINES else []
    head = lines[function.lineno - 1 : first.lineno - 1]
    return "\n".join([*head, *left_out, *newest]).rstrip()


def _imported(file: Path, tree: ast.Module) -> dict[str, tuple[Definition, str]]:
    """The names under which a module imports definitions from other modules of its package, each
    with the definition and the import."""
    found = dict[str, tuple[Definition, str]]()
    files, package = _definitions(), ".".join(file.parent.parts) + "."
    for node in tree.body:
        if not isinstance(node, ast.ImportFrom) or node.level > 1 or node.module is None:
            continue
        module = package + node.module if node.level else node.module
        if not module.startswith(package):
            continue
        others = files.get(file.parent / f"{module.removeprefix(package)}.py", {})
        for alias in node.names:
            if alias.name in others:
                importing = ast.unparse(ast.ImportFrom(node.module, [alias], node.level))
                found[alias.asname or alias.name] = others[alias.name], importing
    return found
