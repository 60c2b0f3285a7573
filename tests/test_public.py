"""What users rely on: exported names, types, and the project's own limits."""

from __future__ import annotations

import re
from pathlib import Path

import kvkeep_lab
import pytest

import kvkeep

ROOT, LAB = (Path(package.__file__).parent for package in (kvkeep, kvkeep_lab))
PROJECT = Path(__file__).parent.parent


def test_exported_names():
    assert sorted(kvkeep.__all__) == [
        "Batch",
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
        "generate_many",
        "keep_until",
        "load",
    ]
    for name in kvkeep.__all__:
        assert getattr(kvkeep, name).__name__ == name
    assert set(kvkeep.__all__) <= set(dir(kvkeep))
    with pytest.raises(AttributeError, match="no attribute 'cash'"):
        _ = kvkeep.cash
    with pytest.raises(ImportError, match=r"kvkeep\.calibrate is now kvkeep_lab\.calibrate"):
        _ = kvkeep.calibrate


def test_files_stay_short():
    for file in (*ROOT.rglob("*.py"), *LAB.rglob("*.py")):
        assert len(file.read_text().splitlines()) <= 600, file


def test_typed():
    assert (ROOT / "py.typed").exists()
    assert (LAB / "py.typed").exists()


def test_the_version_is_written_once():
    released = re.search(r"^## (\d\S*)", (PROJECT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert released is not None
    assert released[1] == kvkeep.__version__
    written = re.compile(rf"(?<![\d.]){re.escape(kvkeep.__version__)}(?![\d.])")
    files = [PROJECT / "pyproject.toml", PROJECT / "Makefile", PROJECT / "README.md"]
    files += [file for folder in (ROOT, PROJECT / "native") for file in folder.rglob("*.*")]
    places = [
        file
        for file in files
        if file.suffix not in (".pyc", ".so") and written.search(file.read_text())
    ]
    assert places == [ROOT / "version.py"]


def test_the_readme_counts_the_models_that_work():
    page = (PROJECT / "docs" / "models.md").read_text()
    counts = re.search(r"Of (\d+) types: works (\d+), refused by attach (\d+)", page)
    assert counts is not None
    types, works, refused = counts.groups()
    readme = (PROJECT / "README.md").read_text()
    assert f"[{refused} of {types} types of models](docs/models.md)" in readme
    assert f"{works} of {types} causal model types" in readme
