"""A store's directory that others wrote to: what lies outside is left alone, what is whole is kept,
and what cannot be read or written is a miss."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import random
import resource
import shutil
import signal
import sqlite3
import stat
import tempfile
from pathlib import Path

import pytest
from support.store_places import blocks_of, found, put

from kvkeep.errors import SpecError
from kvkeep.files import atomic
from kvkeep.store import Disk, opened
from kvkeep.store import backend as backend_module
from kvkeep.store import disk as module
from kvkeep.store import index as index_module

TOKENS = list(range(30))


@pytest.fixture
def filled(tmp_path):
    """A store of four blocks, closed."""
    put(Disk(tmp_path / "store"), TOKENS)
    return tmp_path / "store"


def blocks(path):
    return sorted((path / "blocks").iterdir())


def in_a_child(work, *args):
    """Run something in a process of its own; its exit code, or minus the signal that ended it."""
    process = multiprocessing.get_context("fork").Process(target=work, args=args)
    process.start()
    process.join()
    return process.exitcode


@pytest.mark.parametrize("name", ["../victim.safetensors", "/tmp/x", "..", "", "a\0b", b"x", 7])
def test_names_in_the_index_lead_nowhere_else(filled, name):
    victim = filled / "victim.safetensors"
    victim.write_text("not kvkeep's")
    with sqlite3.connect(filled / "index.sqlite") as index:
        index.execute("update blocks set file = ?", (name,))
    disk = Disk(filled)
    keys = list(disk.scan())
    for key in keys:
        disk.get(key)
    disk.gc(older_than=0, budget=1)
    Disk(filled, budget=1).put(blocks_of([1])[0])
    for key in keys:
        disk.delete(key)
    assert victim.read_text() == "not kvkeep's"
    assert filled.exists()
    assert put(Disk(filled), TOKENS) == 30
    assert found(Disk(filled), TOKENS) == 30


def test_what_lies_in_a_blocks_place(filled, tmp_path):
    """A link, a FIFO and a directory are no blocks: nobody follows them, or waits for a writer."""
    victim = tmp_path / "victim"
    for make in (
        lambda place: place.symlink_to(victim),
        lambda place: os.mkfifo(place),
        lambda place: place.mkdir(),
        lambda place: os.link(victim, place),
    ):
        victim.write_bytes(blocks(filled)[0].read_bytes()[:-1])
        before = victim.read_bytes()
        place = blocks(filled)[0]
        place.unlink()
        make(place)
        disk = Disk(filled)
        labels = disk.labels(list(disk.scan()))
        assert labels.count(None) == 1
        assert found(disk, TOKENS) < 30
        assert disk.damaged == 1
        assert put(disk, TOKENS) == 30
        assert found(disk, TOKENS) == 30
        assert disk.failures == 0
        assert victim.read_bytes() == before


def test_nothing_is_removed_through_links(filled, tmp_path):
    """`gc` looks into no directory but its own."""
    outside = tmp_path / "models"
    outside.mkdir()
    model = outside / f"{7:032x}.safetensors"
    model.write_text("a model")
    (filled / "models").symlink_to(outside)
    assert Disk(filled).gc(older_than=0) == 0
    assert model.exists()
    shutil.rmtree(filled / "quarantine")
    (filled / "quarantine").symlink_to(outside)
    with pytest.raises(SpecError, match="is a symbolic link"):
        Disk(filled)
    assert model.exists()


def _without_descriptors(path):
    disk = Disk(path)
    keys = list(disk.scan())
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, before[1]))
    taken = []
    try:
        while True:
            taken.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        pass
    assert [disk.get(key) for key in keys] == [None] * 4
    assert disk.failures >= 4
    assert disk.damaged == 0
    other = Disk(path)
    assert list(other.scan()) == []
    assert not other.put(blocks_of([1, 2])[0])
    for handle in taken:
        os.close(handle)
    resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert all(disk.get(key) for key in keys)
    assert len(list(other.scan())) == 4


def test_without_file_descriptors_nothing_is_lost(filled):
    assert in_a_child(_without_descriptors, filled) == 0
    assert found(Disk(filled), TOKENS) == 30


@pytest.mark.parametrize("error", [errno.EIO, errno.EACCES, errno.ENOMEM, errno.EMFILE])
def test_what_cannot_be_read_now_is_kept(filled, monkeypatch, error):
    disk = Disk(filled)
    real = os.open

    def failing(path, *args, **kwargs):
        if str(path).endswith(".safetensors"):
            raise OSError(error, os.strerror(error))
        return real(path, *args, **kwargs)

    monkeypatch.setattr(atomic.os, "open", failing)
    assert found(disk, TOKENS) == 0
    assert (disk.damaged, disk.failures > 0) == (0, True)
    monkeypatch.undo()
    assert found(disk, TOKENS) == 30


def _truncating(path):
    whole = module.read_into

    def cut(handle, data, offset):
        if len(data) > 4000:  # once the header was read
            os.truncate(f"/proc/self/fd/{handle}", 4096)
        whole(handle, data, offset)

    module.read_into = cut
    disk = Disk(path)
    key = next(disk.scan())
    assert disk.get(key) is None
    assert disk.damaged == 1


def test_a_file_that_is_cut_short_meanwhile(tmp_path):
    """Mapped, it would end the process."""
    put(Disk(tmp_path / "store"), list(range(200)), block=200)
    assert blocks(tmp_path / "store")[0].stat().st_size > 8192
    assert in_a_child(_truncating, tmp_path / "store") == 0


def test_only_the_owner_may_look(tmp_path):
    before = os.umask(0)
    try:
        put(Disk(tmp_path / "store"), TOKENS)
        held = Disk(tmp_path / "store")
        list(held.scan())
        for place in [tmp_path / "store", *(tmp_path / "store").rglob("*")]:
            mode = stat.S_IMODE(place.stat().st_mode)
            assert mode == (0o700 if place.is_dir() else 0o600), place
        (index,) = (tmp_path / "store").glob("index.sqlite")
        index.write_bytes(b"junk" * 2000)
        assert found(Disk(tmp_path / "store"), TOKENS) == 30
        for place in (tmp_path / "store").glob("index*"):
            assert place == index or stat.S_IMODE(place.stat().st_mode) == 0o600, place
    finally:
        os.umask(before)


def _mutated(data, draw):
    data = bytearray(data)
    for _ in range(draw.choice([1, 1, 4, 40])):
        kind, place = draw.random(), draw.randrange(max(1, len(data)))
        if kind < 0.6:
            data[place] = draw.randrange(256)
        elif kind < 0.8:
            data[place : place + draw.randrange(1, 64)] = draw.randbytes(draw.randrange(1, 64))
        else:
            del data[place : place + draw.choice([1, 100, 4096])]
        if not data:
            break
    return bytes(data)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_damaged_index_is_made_again(tmp_path, seed):
    """Whatever is in it, each block that lies there is found, or put again and then found."""
    put(Disk(tmp_path / "whole"), TOKENS)
    whole = (tmp_path / "whole" / "index.sqlite").read_bytes()
    draw = random.Random(seed)
    rebuilt = 0
    for turn in range(3000 if seed else 15):
        path = tmp_path / f"store{turn % 8}"
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(tmp_path / "whole", path)
        (path / "index.sqlite").write_bytes(_mutated(whole, draw))
        disk = Disk(path, budget=10**9)
        length = found(disk, TOKENS)
        assert length in (0, 8, 16, 24, 30)
        rebuilt += length == 30 and not (path / "index.sqlite").exists()
        assert put(disk, TOKENS) == 30
        assert found(disk, TOKENS) == 30
        disk.gc(older_than=0)
        assert found(Disk(path), TOKENS) == 30
        assert disk.failures == 0, disk.last_error
    assert rebuilt > 3


@pytest.mark.parametrize(
    "junk", [b"", b"junk" * 500, b"SQLite format 3\0" + b"\xff" * 5000], ids=len
)
def test_an_index_that_is_none(filled, junk):
    (filled / "index.sqlite").write_bytes(junk)
    assert found(Disk(filled), TOKENS) == 30


def test_an_index_whose_errors_are_no_text(filled):
    """SQLite quotes what is damaged, which Python's module cannot decode."""
    with sqlite3.connect(filled / "index.sqlite") as index:
        index.execute("pragma writable_schema = on")
        index.execute("update sqlite_master set sql = cast(x'63726561746520d7d7d7' as text)")
    assert found(Disk(filled), TOKENS) == 30


@pytest.mark.parametrize("make", ["link", "fifo", "directory", "gone"])
def test_what_lies_in_the_index_place(filled, tmp_path, make):
    index = filled / "index.sqlite"
    index.unlink()
    if make == "link":
        with sqlite3.connect(tmp_path / "other.sqlite") as other:
            other.execute("create table mine (x)")
        index.symlink_to(tmp_path / "other.sqlite")
    elif make == "fifo":
        os.mkfifo(index)
    elif make == "directory":
        index.mkdir()
    assert found(Disk(filled), TOKENS) == 30
    if make == "link":
        with sqlite3.connect(tmp_path / "other.sqlite") as other:
            assert other.execute("select name from sqlite_master").fetchall() == [("mine",)]


def _with_odd_files_beside(path):
    signal.alarm(30)  # SQLite would wait for a writer
    disk = Disk(path)
    assert found(disk, TOKENS) == 30
    assert put(disk, [*range(8), 99]) == 9
    assert disk.failures == 0, disk.last_error


@pytest.mark.parametrize("end", ["-journal", "-wal", "-shm"])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda place: place.symlink_to("/dev/full")])
def test_what_lies_beside_the_index(filled, end, make):
    index = sqlite3.connect(filled / "index.sqlite")
    index.execute("pragma wal_checkpoint(truncate)")
    index.close()
    place = filled / f"index.sqlite{end}"
    place.unlink(missing_ok=True)
    make(place)
    assert in_a_child(_with_odd_files_beside, filled) == 0


def _while_another_holds_the_lock(path):
    signal.alarm(30)
    index_module._WAIT_S = 0.2
    (path / "index.sqlite").write_bytes(b"junk" * 2000)
    with open(path / "index.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        disk = Disk(path)
        assert found(disk, TOKENS) == 0
        assert not disk.put(blocks_of([1, 2])[0])
        assert "TimeoutError" in disk.last_error
    assert found(disk, TOKENS) == 30


def test_a_lock_that_is_held_for_long(filled):
    assert in_a_child(_while_another_holds_the_lock, filled) == 0


@pytest.mark.parametrize("column", ["file", "nbytes", "used"])
@pytest.mark.parametrize("value", ["text", b"blob", 0.5, -(2**63), 2**63 - 1])
def test_rows_of_other_types(filled, column, value):
    """They are dropped where they are met, also in an index that is open."""
    disk = Disk(filled, budget=10**9)
    assert found(disk, TOKENS) == 30
    with sqlite3.connect(filled / "index.sqlite") as index:
        first = "(select key from blocks order by used limit 1)"
        index.execute(f"update blocks set {column} = ? where key = {first}", (value,))
    keys = list(disk.scan())
    assert len(disk.labels(keys)) == 4
    assert disk.nbytes >= 0
    disk.gc(budget=1)
    Disk(filled, budget=1).put(blocks_of([1, 2])[0])
    assert put(disk, TOKENS) == 30
    assert found(disk, TOKENS) == 30
    assert disk.failures == 0, disk.last_error


def test_a_block_larger_than_the_free_memory(filled, monkeypatch):
    """Nothing is taken for it, and it is kept."""
    disk = Disk(filled)
    size = blocks(filled)[0].stat().st_size
    monkeypatch.setattr(backend_module, "free_bytes", lambda _: size // 2)
    assert found(disk, TOKENS) == 0
    assert (disk.damaged, "MemoryError" in disk.last_error) == (0, True)
    monkeypatch.undo()
    assert found(disk, TOKENS) == 30


def test_an_index_that_is_damaged_while_it_is_open(filled):
    """Whoever sees it makes it again; whoever has the old one open comes over."""
    first, second = Disk(filled), Disk(filled)
    assert found(first, TOKENS) == found(second, TOKENS) == 30
    with sqlite3.connect(filled / "index.sqlite") as index:
        index.execute("drop table blocks")
    assert found(first, TOKENS) == 30
    put(first, [*range(8), 99])
    assert found(second, [*range(8), 99]) == 9
    assert (first.failures, second.failures) == (0, 0)
    assert not (filled / "index.sqlite").exists()


def test_an_index_that_names_another_block(filled):
    """The block is whole, so it is not put aside, and found under its own key again."""
    with sqlite3.connect(filled / "index.sqlite") as index:
        (one, a), (two, b), *_ = index.execute("select key, file from blocks").fetchall()
        index.execute("update blocks set file = ? where key = ?", (b, one))
        index.execute("update blocks set file = ? where key = ?", (a, two))
    disk = Disk(filled)
    found(disk, TOKENS)
    put(disk, TOKENS)
    assert found(disk, TOKENS) == 30
    assert list((filled / "quarantine").iterdir()) == []


def _read_only(path, damage):
    if os.getuid() == 0:
        os.setgid(65534)
        os.setuid(65534)
    assert not os.access(path, os.W_OK)
    disk = opened(path, create=False)
    assert not disk.writable
    assert found(disk, TOKENS) == (30 if damage != "blocks" else 8)
    assert len(list(disk.scan())) == 4
    assert disk.failures == 0, disk.last_error
    assert not disk.put(blocks_of([1, 2])[0])
    assert disk.gc(older_than=0) == 0
    assert "no permission to write" in disk.last_error


@pytest.mark.parametrize("damage", ["none", "open", "index", "gone", "blocks"])
def test_a_read_only_store_is_read(damage):
    with tempfile.TemporaryDirectory() as place:  # pytest's own directories only root may enter
        os.chmod(place, 0o755)
        _test_read_only(Path(place) / "store", damage)


def _test_read_only(path, damage):
    held = Disk(path)
    put(held, TOKENS)
    if damage != "open":
        del held
    if damage == "index":
        (path / "index.sqlite").write_bytes(b"junk" * 999)
    if damage == "gone":
        (path / "index.sqlite").unlink()
    if damage == "blocks":
        with sqlite3.connect(path / "index.sqlite") as index:
            rows = dict(index.execute("select key, file from blocks").fetchall())
        second = blocks_of(TOKENS)[1].key
        place = path / "blocks" / rows[second]
        place.write_bytes(place.read_bytes()[:-5])
    for place in [path, *path.rglob("*")]:
        place.chmod(0o555 if place.is_dir() else 0o444)
    assert in_a_child(_read_only, path, damage) == 0
    for place in [path, *path.rglob("*")]:
        place.chmod(0o755 if place.is_dir() else 0o644)


def _full(path):
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    disk = Disk(path)
    for limit in (10, 500, 3000):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, -1))
        assert not disk.put(blocks_of(list(range(limit, limit + 8)))[0])
        assert disk.failures
        assert found(disk, TOKENS) == 30
        assert len(list((path / "blocks").iterdir())) == 4
        assert list((path / "new").iterdir()) == []
        assert found(Disk(path), TOKENS) == 30
    resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))
    assert put(disk, list(range(500, 508))) == 8
    assert found(disk, list(range(500, 508))) == 8


def test_a_full_disk(filled):
    assert in_a_child(_full, filled) == 0
    assert found(Disk(filled), TOKENS) == 30


def test_no_space_is_a_miss_and_leaves_nothing(filled, monkeypatch):
    disk = Disk(filled)

    def no_space(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(atomic.os, "write", no_space)
    assert not disk.put(blocks_of([1, 2])[0])
    assert "No space left" in disk.last_error
    assert list((filled / "new").iterdir()) == []
    assert found(disk, TOKENS) == 30


def _unreadable(path):
    os.setuid(65534)
    for call in (lambda: Disk(path / "store"), lambda: opened(path / "store", create=False)):
        with pytest.raises(SpecError):
            call()


@pytest.mark.skipif(os.getuid() != 0, reason="only root may become another user")
def test_where_nobody_may_look(tmp_path):
    tmp_path.chmod(0o700)
    Disk(tmp_path / "store")
    assert in_a_child(_unreadable, tmp_path) == 0


def test_where_no_store_can_be_made(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(SpecError, match="no store can be created"):
        Disk(tmp_path / "file" / "store")
