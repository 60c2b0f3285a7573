"""The faults that `support/faults.py` plants fit the source as it is."""

from __future__ import annotations

import pytest
from support.faults import FAULTS, ROOT, located


def test_every_fault_still_applies_to_its_source():
    stale = []
    for fault in FAULTS:
        try:
            located(fault, ROOT / "src" / "kvkeep")
        except SystemExit as error:
            stale.append(str(error))
        missing = [name for name in fault.tests.split() if not (ROOT / "tests" / name).exists()]
        stale += [f"{fault.name}: no tests/{name}" for name in missing]
    assert stale == []


def test_a_line_that_changed_is_noticed(tmp_path):
    fault = FAULTS[0]
    (tmp_path / fault.place).parent.mkdir()
    (tmp_path / fault.place).write_text("pass\n")
    with pytest.raises(SystemExit, match=f"{fault.name}: 0 times"):
        located(fault, tmp_path)


def test_names_of_faults_are_unique():
    names = [fault.name for fault in FAULTS]
    assert sorted(set(names)) == sorted(names)
