"""What users rely on: exported names, docstrings, types, and the project's own limits."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from pathlib import Path

import pytest

import kvkeep

ROOT = Path(kvkeep.__file__).parent
FOUND = pkgutil.walk_packages([str(ROOT)], "kvkeep.")
MODULES = [m.name for m in FOUND if "._" not in m.name]  # _native is a library, not a module


def test_exported_names():
    assert sorted(kvkeep.__all__) == [
        "Cache",
        "CacheSpec",
        "CacheStats",
        "CapacityError",
        "Graphed",
        "KVKeepError",
        "LayerCache",
        "OutOfMemoryError",
        "PrecisionWarning",
        "PrefixStore",
        "Program",
        "RollbackError",
        "SavedCacheError",
        "ShapeError",
        "SpecError",
        "StateError",
        "UnsupportedError",
        "attach",
        "attend",
        "detach",
        "export",
        "fingerprint",
        "load",
    ]
    for name in kvkeep.__all__:
        assert getattr(kvkeep, name).__name__ == name
    assert set(kvkeep.__all__) <= set(dir(kvkeep))
    with pytest.raises(AttributeError, match="no attribute 'cash'"):
        _ = kvkeep.cash


@pytest.mark.parametrize("name", MODULES)
def test_everything_public_says_what_it_is(name):
    module = importlib.import_module(name)
    assert module.__doc__
    for key, value in vars(module).items():
        mine = getattr(value, "__module__", None) == name
        if mine and not key.startswith("_") and (inspect.isclass(value) or callable(value)):
            assert inspect.getdoc(value), f"{name}.{key}"


def test_files_stay_short():
    for file in ROOT.rglob("*.py"):
        assert len(file.read_text().splitlines()) <= 600, file


def test_typed():
    assert (ROOT / "py.typed").exists()
