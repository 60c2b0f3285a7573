"""The reference names every public name, and no other."""

from __future__ import annotations

import ast
import inspect
import re
import runpy
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import kvkeep_lab
import pytest

import kvkeep
from kvkeep import errors

ROOT = Path(__file__).parent.parent
SITE = runpy.run_path(str(ROOT / "tools" / "site.py"))
PACKAGES = [Path(package.__file__).parent for package in (kvkeep, kvkeep_lab)]
DIRECTIVE = re.compile(r"^::: (\S+)$", re.MULTILINE)
EXPORTS = re.compile(r"^(?:\w+, )?__all__\b", re.MULTILINE)
PYTHON = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def named_by_pages() -> list[str]:
    """What the pages of the reference describe, by its path."""
    pages = sorted((ROOT / "docs" / "reference").glob("*.md"))
    texts = [SITE["with_each_part"](page.read_text()) for page in pages]
    return [path for text in texts for path in DIRECTIVE.findall(text)]


def exporting() -> dict[str, Path]:
    """Modules with an `__all__`, and their files; the command line has a page of another kind."""
    found = {}
    for file in (path for package in PACKAGES for path in package.rglob("*.py")):
        home = next(package.parent for package in PACKAGES if package in file.parents)
        module = ".".join(file.relative_to(home).with_suffix("").parts).removesuffix(".__init__")
        if EXPORTS.search(file.read_text()) and ".cli" not in module:
            found[module] = file
    return found


def listed() -> set[str]:
    return {f"{module}.{name}" for module in exporting() for name in import_module(module).__all__}


def bound(
    statements: list[ast.stmt], checking: bool = False
) -> Iterator[tuple[str | None, ast.stmt]]:
    """The names that a module's statements bind, found without running them. Under TYPE_CHECKING,
    an import counts if it has the form `import name as name`: type checkers export no other."""
    for statement in statements:
        match statement:
            case ast.If(test=ast.Name("TYPE_CHECKING")):
                yield from bound(statement.body, checking=True)
            case ast.Import() | ast.ImportFrom():
                for alias in statement.names:
                    yield alias.asname or (None if checking else alias.name), statement
            case ast.FunctionDef() | ast.ClassDef():
                yield statement.name, statement
            case ast.Assign() | ast.AnnAssign():
                targets = [getattr(statement, "target", None), *getattr(statement, "targets", [])]
                names = (node for target in targets if target for node in ast.walk(target))
                yield from ((node.id, statement) for node in names if isinstance(node, ast.Name))


def imported_by_documents() -> set[str]:
    """Names that an example of a document imports."""
    found = set()
    for document in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for example in PYTHON.findall(document.read_text()):
            for node in ast.walk(ast.parse(example)):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kvkeep"):
                    found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {path for path in found if not inspect.ismodule(found_at(path))}


def found_at(path: str) -> object:
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)


def key(path: str) -> object:
    """The same for all paths of one thing, such as `kvkeep.Batch` and `kvkeep.generate.Batch`."""
    thing = found_at(path)
    return path if isinstance(thing, str | int | float) else id(thing)


@pytest.fixture(scope="module")
def public() -> dict[object, str]:
    raised = {
        f"kvkeep.errors.{name}"
        for name, thing in vars(errors).items()
        if isinstance(thing, type) and issubclass(thing, BaseException | Warning)
    }
    paths = listed() | imported_by_documents() | raised
    return {key(path): path for path in sorted(paths, reverse=True)}


def test_every_public_name_has_a_place(public):
    described = {key(path) for path in named_by_pages()}
    assert sorted(path for thing, path in public.items() if thing not in described) == []


def test_nothing_else_has_one(public):
    assert [path for path in named_by_pages() if key(path) not in public] == []


def test_each_has_one_place():
    described = [key(path) for path in named_by_pages()]
    assert len(described) == len(set(described))


def test_type_checkers_find_every_public_name():
    """So do the tools that make the reference's pages. Neither runs a module, so neither sees names
    that a package's `__getattr__` imports."""
    unknown, other = [], []
    for module, file in exporting().items():
        names = dict(bound(ast.parse(file.read_text()).body))
        for name in import_module(module).__all__:
            path = f"{module}.{name}"
            if name not in names:
                unknown.append(path)
            elif isinstance(source := names[name], ast.ImportFrom):
                real = next(a.name for a in source.names if name in (a.asname, a.name))
                if found_at(path) is not getattr(import_module(source.module or ""), real):
                    other.append(path)
    assert (unknown, other) == ([], [])
