"""What users rely on: exported names, types, and the project's own limits."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import kvkeep_lab
import pytest

import kvkeep

ROOT, LAB = (Path(package.__file__).parent for package in (kvkeep, kvkeep_lab))
PROJECT = Path(__file__).parent.parent
COUNT = runpy.run_path(str(PROJECT / "tools" / "count.py"))


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


OF_TRANSFORMERS = {  # its interface has more than thirty members
    "src/kvkeep/hf/cache.py: Cache",
    "src/kvkeep/hf/forward/rehearsal.py: _CountingCache",
    "src/kvkeep/hf/interface/transformers_names.py: TransformersNames",
}
PLAIN_CALLS = {  # docs/design.md says why
    "src/kvkeep/attention/__init__.py: attend",
    "src/kvkeep/layer/layer.py: step",
}


def test_files_functions_and_classes_stay_small():
    for file in (*COUNT["files"](), *(PROJECT / "native").glob("*.*")):
        assert len(file.read_text().splitlines()) <= 500, file
    members = COUNT["members"]()
    assert {name for name, count in members.items() if count > 30} == OF_TRANSFORMERS
    assert members["src/kvkeep/host/cache.py: ModelCache"] > 20  # inherited members count
    for name, lines, parameters in COUNT["functions"]():
        if not name.startswith(("src/kvkeep/kernels/", "src/kvkeep/cli/")):
            assert lines <= 80, name
            assert parameters <= 8 or name in PLAIN_CALLS, name


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
