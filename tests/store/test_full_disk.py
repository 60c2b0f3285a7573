"""A disk without space left can be cleaned: block files are deleted before the index is changed."""

from __future__ import annotations

import gc
import os
import sqlite3
import subprocess
from contextlib import suppress

import pytest
from support.store_places import blocks_of, put
from typer.testing import CliRunner

from kvkeep.cli.app import app
from kvkeep.store import Disk
from kvkeep.store.index import Index

BLOCK = 200
TEXT = list(range(BLOCK * 10))
OTHER = list(range(5000, 5000 + BLOCK))
BLOCKS = blocks_of(TEXT, block=BLOCK)
(NEW,) = blocks_of(OTHER, block=BLOCK)
SIZE = len(NEW.to_bytes())


@pytest.fixture
def small(tmp_path):
    """A directory on a disk of 2 MiB."""
    path = tmp_path / "small"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(path)]
    try:
        done = subprocess.run(mount, capture_output=True, text=True)
    except FileNotFoundError as error:
        pytest.skip(str(error))
    if done.returncode:
        pytest.skip(f"no disk can be mounted here: {done.stderr.strip()}")
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True)


def fill(path):
    """Leave no space on a disk."""
    with open(path / "fill", "wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))
    assert os.statvfs(path).f_bavail == 0


def files(disk):
    return list((disk.path / "blocks").iterdir())


def require_right(disk, most):
    """What is counted is there, and within a budget; new blocks can be put."""
    assert 0 < disk.nbytes == sum(file.stat().st_size for file in files(disk)) <= most
    assert {disk._file(key) for key in disk.scan()} == set(files(disk))
    assert disk.put(NEW)
    assert disk.contains(NEW.key)


@pytest.mark.parametrize("opened", ["open elsewhere", "not open"])
def test_gc_frees_space_on_a_full_disk(small, opened):
    other = Disk(small / "store")
    put(other, TEXT, block=BLOCK)
    if opened == "not open":
        del other
        gc.collect()  # closes its connection
    fill(small)
    arguments = ["store", "gc", str(small / "store"), "--budget", str(4 * SIZE)]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    assert os.statvfs(small).f_bavail > 0
    require_right(Disk(small / "store"), 4 * SIZE)


def test_a_put_evicts_before_it_writes(small):
    put(Disk(small / "store"), TEXT, block=BLOCK)
    held = Disk(small / "store", budget=8 * SIZE)
    assert len(list(held.scan())) == 10
    fill(small)
    assert held.put(NEW)
    assert not held.contains(BLOCKS[-1].key)
    require_right(held, 8 * SIZE)


def test_a_block_is_deleted_on_a_full_disk(small):
    disk = Disk(small / "store")
    put(disk, TEXT, block=BLOCK)
    one, two, *_ = disk.scan()
    fill(small)
    disk.delete(one)
    disk.delete(two)
    assert not disk.contains(one)
    require_right(disk, 8 * SIZE)


def no_space(*args):
    error = sqlite3.OperationalError("database or disk is full")
    error.sqlite_errorcode = sqlite3.SQLITE_FULL
    raise error


@pytest.mark.parametrize("call", ["change", "ask"])
def test_an_index_that_needs_space_is_changed_after_files_are_gone(tmp_path, monkeypatch, call):
    """Where `ask` fails, the blocks that were written last stay."""
    disk = Disk(tmp_path / "store")
    put(disk, TEXT, block=BLOCK)
    keys = [block.key for block in BLOCKS]
    for at, key in enumerate(keys):
        os.utime(disk._file(key), (at, at))
    real = getattr(Index, call)

    def full(self, question):
        return no_space() if len(files(disk)) == 10 else real(self, question)

    monkeypatch.setattr(Index, call, full)
    assert disk.gc(budget=4 * SIZE) == 6 * SIZE
    assert disk.failures == (call == "ask")
    assert len(list(disk.scan())) == 4
    assert disk.contains(keys[-1]) == (call == "ask")
    require_right(disk, 4 * SIZE)


def test_gc_forgets_blocks_whose_files_are_gone(tmp_path):
    disk = Disk(tmp_path / "store")
    put(disk, TEXT, block=BLOCK)
    for file in files(disk)[:6]:
        file.unlink()
    assert disk.gc() == 0
    assert len(list(disk.scan())) == 4
    require_right(disk, 4 * SIZE)


def test_a_block_larger_than_the_budget_evicts_nothing(tmp_path):
    disk = Disk(tmp_path / "store", budget=2 * SIZE)
    assert disk.put(NEW)
    (large,) = blocks_of(list(range(500)), block=500)
    assert not disk.put(large)
    assert disk.contains(NEW.key)
