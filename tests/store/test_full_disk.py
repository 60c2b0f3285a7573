"""A disk without space left can be cleaned, and blocks are evicted before others are written."""

from __future__ import annotations

import os
import subprocess
from contextlib import suppress

import pytest
from support.store_places import blocks_of, put
from typer.testing import CliRunner

from kvkeep.cli.app import app
from kvkeep.store import Disk

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
    return list((disk.path / "blocks").rglob("*.safetensors"))


def require_right(disk, most):
    """What is counted is there, and within a budget; new blocks can be put."""
    assert 0 < disk.nbytes == sum(file.stat().st_size for file in files(disk)) <= most
    assert len(list(disk.scan())) == len(files(disk))
    assert disk.put(NEW)
    assert disk.contains(NEW.key)


def test_gc_frees_space_on_a_full_disk(small):
    put(Disk(small / "store"), TEXT, block=BLOCK)
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


def test_a_block_larger_than_the_budget_evicts_nothing(tmp_path):
    disk = Disk(tmp_path / "store", budget=2 * SIZE)
    assert disk.put(NEW)
    (large,) = blocks_of(list(range(500)), block=500)
    assert not disk.put(large)
    assert disk.contains(NEW.key)
