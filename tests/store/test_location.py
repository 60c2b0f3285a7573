"""Locations: any filesystem of fsspec, which may fail at any call."""

from __future__ import annotations

import os
import stat
import time
from datetime import UTC, datetime

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from support.store_places import Place, blocks_of, found, put

from kvkeep.errors import SpecError
from kvkeep.store import Location
from kvkeep.store import backend as backend_module
from kvkeep.store.location import _written_at

TEXT = list(range(40))  # five blocks


class Failing(MemoryFileSystem):
    """Fails at the calls that are named, after it did half of what it should."""

    protocol = "failing"
    store: dict = {}  # noqa: RUF012
    pseudo_dirs = [""]  # noqa: RUF012
    cachable = False
    broken: dict = {}  # noqa: RUF012

    def _fail(self, name):
        if name in self.broken:
            raise self.broken[name]

    def pipe_file(self, path, value, **kwargs):
        if "pipe_file" in self.broken:
            super().pipe_file(path, value[: len(value) // 2], **kwargs)
        self._fail("pipe_file")
        super().pipe_file(path, value, **kwargs)

    def mv(self, *args, **kwargs):
        self._fail("mv")
        super().mv(*args, **kwargs)

    def cat_file(self, *args, **kwargs):
        self._fail("cat_file")
        return super().cat_file(*args, **kwargs)

    def find(self, *args, **kwargs):
        self._fail("find")
        return super().find(*args, **kwargs)

    def rm_file(self, *args, **kwargs):
        self._fail("rm_file")
        return super().rm_file(*args, **kwargs)


@pytest.fixture
def broken():
    """What fails, and how."""
    fsspec.register_implementation("failing", Failing, clobber=True)
    Failing.store.clear()
    Failing.broken.clear()
    return Failing.broken


@pytest.fixture
def files(tmp_path):
    return Place("location-file", tmp_path)


ERRORS = [RuntimeError("x"), ConnectionError("x"), PermissionError("x"), NotImplementedError("x")]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("call", ["pipe_file", "mv"])
def test_nothing_half_is_found(broken, call, error):
    backend = Location("failing://store")
    broken[call] = error
    assert put(backend, TEXT) == 40
    assert backend.last_error == f"{type(error).__name__}: x"
    away = not isinstance(error, PermissionError)
    assert backend.failures == (1 if away else 5)
    assert backend.resting == away
    broken.clear()
    assert Failing.store == {}
    fresh = Location("failing://store")
    assert (list(fresh.scan()), found(fresh, TEXT)) == ([], 0)
    assert put(fresh, TEXT) == 40
    assert found(fresh, TEXT) == 40


def test_what_cannot_be_removed_is_not_found(broken):
    broken |= {"pipe_file": OSError("x"), "rm_file": OSError("x")}
    put(Location("failing://store"), TEXT)
    broken.clear()
    backend = Location("failing://store")
    assert len(Failing.store) == 1
    assert list(backend.scan()) == []
    assert found(backend, TEXT) == 0
    assert backend.gc(older_than=3600) == 0
    assert backend.gc(older_than=0) > 0
    assert Failing.store == {}


def test_a_place_that_is_away(broken, monkeypatch):
    """Is a miss, is left alone for a while, and is used again when it is back."""
    monkeypatch.setattr(backend_module, "REST_S", 0.3)
    backend = Location("failing://store")
    put(backend, TEXT)
    broken |= {"cat_file": TimeoutError("x"), "find": TimeoutError("x")}
    key = blocks_of(TEXT)[0].key
    for ask in (
        lambda: backend.get(key),
        lambda: found(backend, TEXT),
        lambda: list(backend.scan()),
        lambda: backend.nbytes,
        lambda: backend.missing([key]),
        lambda: backend.contains(key),
        lambda: backend.gc(budget=1),
    ):
        assert not ask()
    assert backend.failures == 1
    broken.clear()
    while backend.resting:
        time.sleep(0.05)
    assert found(backend, TEXT) == 40


def test_only_blocks_are_listed(files):
    backend = files.open()
    put(backend, TEXT)
    keys = list(backend.scan())
    folder = files.path / "store" / "blocks"
    for name in ("x.safetensors", "a/b.safetensors", "a/b/c.txt", "a/b/c/d.safetensors"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("x")
    assert sorted(backend.scan()) == sorted(keys)
    assert len(keys) == 5


def test_the_oldest_goes_first(files):
    texts = [[first] * 8 for first in range(4)]
    blocks = blocks_of(*texts)
    backend = files.open()
    for age, block in enumerate(blocks):
        backend.put(block)
        when = time.time() - 1000 + age
        os.utime(files.path / "store" / "blocks" / f"{block.key}.safetensors", (when, when))
    size = backend.nbytes // 4
    assert backend.gc(budget=2 * size) == 2 * size
    assert [backend.contains(block.key) for block in blocks] == [False, False, True, True]
    assert files.open(2 * size).put(blocks[0])
    assert [backend.contains(block.key) for block in blocks] == [True, False, False, True]


def test_times_of_filesystems():
    when = datetime(2026, 1, 2, tzinfo=UTC)
    for info in (
        {"mtime": when.timestamp(), "created": 5.0},
        {"LastModified": when},
        {"last_modified": when},
        {"updated": "2026-01-02T00:00:00Z"},
        {"created": when},
    ):
        assert _written_at(info) == when.timestamp()
    assert _written_at({"size": 3}) == 0.0


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("s4://bucket/path", "s4"),
        ("memory://a*b", "wildcard"),
        ("sftp://host/path", "paramiko"),
    ],
)
def test_bad_input(url, message):
    with pytest.raises(SpecError, match=message):
        Location(url)
    with pytest.raises(SpecError, match="at least 1"):
        Location("memory://x", budget=0)


@pytest.mark.parametrize("scheme", ["file://", "local://", ""])
def test_only_the_owner_may_look_at_local_files(tmp_path, scheme):
    before = os.umask(0o022)
    try:
        backend = Location(f"{scheme}{tmp_path}/above/store")
        put(backend, TEXT)
        backend.quarantine(next(backend.scan()))
    finally:
        os.umask(before)
    assert found(backend, TEXT) in (0, 8, 16, 24, 32)
    store = tmp_path / "above" / "store"
    assert {place.name for place in store.iterdir()} == {"blocks", "new", "quarantine"}
    for place in [store, *store.rglob("*")]:
        assert stat.S_IMODE(place.stat().st_mode) == (0o700 if place.is_dir() else 0o600), place
    assert backend.failures == 0, backend.last_error
