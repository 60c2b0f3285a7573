"""A store's directory that others wrote to: what lies outside is left alone, what is whole is kept,
and what cannot be read or written is a miss."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import resource
import shutil
import signal
import stat
import tempfile
import time
from pathlib import Path

import pytest
from support.store_places import blocks_of, found, put

from kvkeep.errors import SpecError
from kvkeep.files import atomic
from kvkeep.store import Disk, open_store
from kvkeep.store import backend as backend_module
from kvkeep.store import disk as module

TOKENS = list(range(30))


@pytest.fixture
def filled(tmp_path):
    """A store of four blocks, closed."""
    put(Disk(tmp_path / "store"), TOKENS)
    return tmp_path / "store"


def blocks(path):
    return sorted((path / "blocks").rglob("*.safetensors"))


def in_a_child(work, *args):
    """Run something in a process of its own; its exit code, or minus the signal that ended it."""
    process = multiprocessing.get_context("fork").Process(target=work, args=args)
    process.start()
    process.join()
    return process.exitcode


def test_other_files_are_left_alone(filled):
    names = ["victim.safetensors", "blocks/victim.safetensors", "blocks/a/victim.safetensors"]
    for name in names:
        (filled / name).parent.mkdir(parents=True, exist_ok=True)
        (filled / name).write_text("not kvkeep's")
    disk = Disk(filled, budget=10**9)
    assert len(list(disk.scan())) == 4
    disk.gc(older_than=0, budget=1)
    assert list(disk.scan()) == []
    Disk(filled, budget=1).put(blocks_of([1])[0])
    for name in names:
        assert (filled / name).read_text() == "not kvkeep's"
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
    finally:
        os.umask(before)


def _while_another_holds_the_lock(path):
    signal.alarm(30)
    module._WAIT_S = 0.2
    disk = Disk(path, budget=10**9)
    with open(path / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert found(disk, TOKENS) == 30  # who reads needs no lock
        assert not disk.put(blocks_of([1, 2])[0])
        assert "Timeout" in disk.last_error
        assert disk.gc(budget=1) == 0
    assert disk.put(blocks_of([1, 2])[0])
    assert found(disk, TOKENS) == 30


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda place: place.symlink_to("/dev/full")])
def test_what_lies_in_the_locks_place(filled, make):
    """Stops no reader, and nobody waits for it."""
    make(filled / "lock")
    disk = Disk(filled, budget=10**9)
    assert found(disk, TOKENS) == 30
    disk.put(blocks_of([1, 2])[0])
    assert found(disk, TOKENS) == 30


def test_a_forked_child_keeps_no_lock(filled):
    disk = Disk(filled, budget=10**9)
    with disk._folder.lock():
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
        child.start()
    module_wait, module._WAIT_S = module._WAIT_S, 1
    try:
        assert disk.put(blocks_of([1, 2])[0])
    finally:
        module._WAIT_S = module_wait
        child.kill()
        child.join()


def test_a_lock_that_is_held_for_long(filled):
    assert in_a_child(_while_another_holds_the_lock, filled) == 0


def test_a_block_larger_than_the_free_memory(filled, monkeypatch):
    """Nothing is taken for it, and it is kept."""
    disk = Disk(filled)
    size = blocks(filled)[0].stat().st_size
    monkeypatch.setattr(backend_module, "free_bytes", lambda _: size // 2)
    assert found(disk, TOKENS) == 0
    assert (disk.damaged, "MemoryError" in disk.last_error) == (0, True)
    monkeypatch.undo()
    assert found(disk, TOKENS) == 30


def _read_only(path, damage):
    if os.getuid() == 0:
        os.setgid(65534)
        os.setuid(65534)
    assert not os.access(path, os.W_OK)
    disk = open_store(path, create=False)
    assert found(disk, TOKENS) == (30 if damage != "blocks" else 8)
    assert len(list(disk.scan())) == 4
    assert (disk.failures > 0) == (damage == "blocks"), disk.last_error  # nor can it be put aside
    assert not disk.put(blocks_of([1, 2])[0])
    assert disk.gc(older_than=0, budget=1) == 0
    assert "Permission denied" in disk.last_error


@pytest.mark.parametrize("damage", ["none", "blocks"])
def test_a_read_only_store_is_read(damage):
    with tempfile.TemporaryDirectory() as place:  # pytest's own directories only root may enter
        os.chmod(place, 0o755)
        _test_read_only(Path(place) / "store", damage)


def _test_read_only(path, damage):
    put(Disk(path), TOKENS)
    if damage == "blocks":
        place = path / "blocks" / f"{blocks_of(TOKENS)[1].key.replace('/', '-')}.safetensors"
        place.write_bytes(place.read_bytes()[:-5])
    for place in [path, *path.rglob("*")]:
        place.chmod(0o555 if place.is_dir() else 0o444)
    assert in_a_child(_read_only, path, damage) == 0
    for place in [path, *path.rglob("*")]:
        place.chmod(0o755 if place.is_dir() else 0o644)


def _full(path):
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    disk = Disk(path)
    for limit in (10, 500, 1500):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, -1))
        assert not disk.put(blocks_of(list(range(limit, limit + 8)))[0])
        assert disk.failures
        assert found(disk, TOKENS) == 30
        assert len(blocks(path)) == 4
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
    for call in (lambda: Disk(path / "store"), lambda: open_store(path / "store", create=False)):
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
