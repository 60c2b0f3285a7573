"""Blocks on disk: the files that lie there."""

from __future__ import annotations

import os
import shutil

import pytest
from support.store_places import found, put

from kvkeep.errors import SpecError
from kvkeep.store import Disk
from kvkeep.store import disk as module
from kvkeep.store.disk import _file


def files(disk, part="blocks"):
    return sorted(path for path in (disk.path / part).rglob("*") if not path.is_dir())


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


def test_what_an_earlier_version_left(tmp_path):
    """Its blocks had no keys in their names: they are never found, and removed by `gc`."""
    disk = Disk(tmp_path / "store")
    put(disk, list(range(16)))
    old = disk.path / "blocks" / f"{7:032x}.safetensors"
    old.write_bytes(files(disk)[0].read_bytes())
    assert len(list(disk.scan())) == 2
    size = old.stat().st_size
    assert disk.gc(older_than=3600) == 0
    assert disk.gc(older_than=0) == size
    assert not old.exists()
    assert found(disk, list(range(16))) == 16


def test_uses_are_kept_in_the_times_of_files(tmp_path):
    disk = Disk(tmp_path / "store")
    put(disk, list(range(16)))
    for file in files(disk):
        os.utime(file, (5, 5))
    key = next(disk.scan())
    disk.get(key, used=False)
    disk.labels([key])
    assert {file.stat().st_mtime for file in files(disk)} == {5}
    disk.get(key)
    assert sorted(file.stat().st_mtime > 5 for file in files(disk)) == [False, True]


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


def test_a_store_that_somebody_removed_is_made_again(tmp_path):
    disk = Disk(tmp_path / "store", budget=10**6)
    put(disk, list(range(16)))
    shutil.rmtree(disk.path)
    assert (list(disk.scan()), disk.nbytes) == ([], 0)
    assert put(disk, list(range(16))) == found(disk, list(range(16))) == 16
    assert disk.failures == 0


def test_a_store_with_a_budget_remembers_bytes_and_sees_what_others_do(tmp_path, monkeypatch):
    """It asks for a file's status once, and again before it is removed: others may have used it."""
    one = Disk(tmp_path / "probe")
    put(one, list(range(8)))
    disk = Disk(tmp_path / "store", budget=4 * one.nbytes + 100)
    for start in (0, 10, 20, 30):
        put(disk, list(range(start, start + 8)))
    other = Disk(disk.path)
    assert found(other, list(range(8))) == 8
    other.delete(next(key for key in other.scan() if f"/{20:08x}" in key))
    assert disk.nbytes == 3 * one.nbytes
    asked = []
    monkeypatch.setattr(module, "_file", lambda path: asked.append(path) or _file(path))
    put(disk, list(range(40, 48)))
    assert asked == []
    put(disk, list(range(50, 58)))
    monkeypatch.undo()
    assert [found(disk, list(range(start, start + 8))) for start in range(0, 60, 10)] == [
        *(8, 0, 0),
        *(8, 8, 8),
    ]
    assert len(asked) == 3  # the block at 40, the first that was used again, the second
