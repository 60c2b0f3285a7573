"""The reference names every public name, and no other."""

from __future__ import annotations

import ast
import inspect
import re
import runpy
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


def listed() -> set[str]:
    """Names in the `__all__` of a module; the command line has a page of another kind."""
    found = set()
    for file in (path for package in PACKAGES for path in package.rglob("*.py")):
        home = next(package.parent for package in PACKAGES if package in file.parents)
        module = ".".join(file.relative_to(home).with_suffix("").parts).removesuffix(".__init__")
        if EXPORTS.search(file.read_text()) and ".cli" not in module:
            found |= {f"{module}.{name}" for name in import_module(module).__all__}
    return found


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
