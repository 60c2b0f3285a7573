"""Blocks on disk: the files that lie there, and the index of them."""

from __future__ import annotations

import sqlite3

import pytest
from support.store_places import blocks_of, found, put

from kvkeep.errors import SpecError
from kvkeep.store import Disk


def files(disk, part="blocks"):
    return sorted((disk.path / part).iterdir())


def test_files(tmp_path):
    """One for each block, and none beside them."""
    disk = Disk(tmp_path / "store")
    for end in range(4):
        put(disk, [*range(16), 90 + end])
    assert len(files(disk)) == 2 + 4
    assert disk.nbytes == sum(file.stat().st_size for file in files(disk))
    assert files(disk, "new") == files(disk, "quarantine") == []
    first, *_ = disk.scan()
    disk.delete(first)
    assert len(files(disk)) == 5


def test_what_killed_processes_left(tmp_path):
    disk = Disk(tmp_path / "store")
    put(disk, list(range(16)))
    for part in ("blocks", "new"):
        (disk.path / part / f"{0:032x}.safetensors").write_text("half of it")
    assert disk.gc(older_than=3600) == 0
    assert disk.gc(older_than=0) == 20
    assert found(disk, list(range(16))) == 16
    assert len(files(disk)) == 2


def test_what_the_index_refuses_is_counted(tmp_path):
    disk = Disk(tmp_path / "store")
    put(disk, list(range(16)))
    disk._index._repair = lambda: None
    with sqlite3.connect(disk.path / "index.sqlite") as index:
        index.execute("drop table blocks")
    assert found(disk, list(range(16))) == 0
    assert not disk.put(blocks_of([1])[0])
    assert list(disk.scan()) == []
    assert disk.gc(older_than=0) == 0
    assert len(files(disk)) == 2
    assert disk.failures > 2
    assert disk.last_error == "OperationalError: no such table: blocks"


def test_bad_input(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(SpecError, match="not a directory"):
        Disk(tmp_path / "file")
    with pytest.raises(SpecError, match="at least 1"):
        Disk(tmp_path / "a", budget=0)


def test_the_end_of_a_text_goes_before_its_beginning(tmp_path):
    probe = Disk(tmp_path / "probe")
    put(probe, list(range(8)))
    for fill in (lambda disk: None, lambda disk: found(disk, list(range(24)))):
        disk = Disk(tmp_path / f"store{id(fill)}", budget=3 * probe.nbytes + 100)
        put(disk, list(range(24)))
        fill(disk)
        put(disk, list(range(50, 58)))
        assert found(disk, list(range(24))) == 16
