"""Whole files, and what lies in their places: links, FIFOs, files that shrink."""

from __future__ import annotations

import errno
import json
import os
import stat
from dataclasses import dataclass

import pytest
from support.two_layer_caches import cache_of, filled

from kvkeep.errors import SavedCacheError
from kvkeep.files import atomic, snapshot
from kvkeep.files.atomic import PARTIAL, whole_file
from kvkeep.files.headers import typed
from kvkeep.files.snapshot import Saved
from kvkeep.files.tensor_file import Layout
from kvkeep.reading import NoFileError, open_file, read_into


def write(path, data=b"new", **options):
    with whole_file(path, sync=False, **options) as file:
        file.write(data)


def mode(path):
    return stat.S_IMODE(path.lstat().st_mode)


def save(path, **options):
    cache = filled("keep_all", 2, ragged=False)
    snapshot.save(
        cache, path, specs=["keep_all"] * len(cache), fingerprint={}, sync=False, **options
    )


@pytest.mark.parametrize("before", [None, 0o600, 0o640])
@pytest.mark.parametrize("private", [False, True])
def test_a_file_has_its_mode_from_the_first_byte_on(tmp_path, before, private):
    path = tmp_path / "a"
    if before is not None:
        path.touch(before)
    final = before or (0o600 if private else 0o644)
    umask = os.umask(0o022)
    try:
        with whole_file(path, sync=False, private=private) as file:
            (partial,) = (p for p in tmp_path.iterdir() if p.name.endswith(PARTIAL))
            assert mode(partial) == final
            file.write(b"x")
    finally:
        os.umask(umask)
    assert mode(path) == final


def test_what_lies_beside_a_file_stops_nobody(tmp_path):
    """Names of half-written files that are links or FIFOs are left alone, and not waited for."""
    victim = tmp_path / "victim"
    victim.write_text("mine")
    os.mkfifo(tmp_path / f".1{PARTIAL}")
    (tmp_path / f".2{PARTIAL}").symlink_to(victim)
    (tmp_path / f".3{PARTIAL}").mkdir()
    (tmp_path / f".4{PARTIAL}").write_text("left by a process that was killed")
    write(tmp_path / "a")
    assert (tmp_path / "a").read_bytes() == b"new"
    assert victim.read_text() == "mine"
    left = sorted(p.name for p in tmp_path.iterdir())
    assert left == [f".1{PARTIAL}", f".2{PARTIAL}", f".3{PARTIAL}", "a", "victim"]


def test_a_link_is_replaced_and_not_written_through(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / "a").symlink_to(victim)
    write(tmp_path / "a")
    assert victim.read_text() == "mine"
    assert not (tmp_path / "a").is_symlink()


@pytest.mark.parametrize("make", ["fifo", "directory", "socket", "loop", "device"])
def test_what_is_no_file_is_refused_at_once(tmp_path, make):
    path = tmp_path / "a.kv"
    if make == "fifo":
        os.mkfifo(path)
    elif make == "directory":
        path.mkdir()
    elif make == "socket":
        os.mknod(path, stat.S_IFSOCK | 0o600)
    elif make == "loop":
        path.symlink_to(path)
    else:
        path.symlink_to("/dev/zero")
    with pytest.raises(NoFileError, match="not a regular file"), open_file(path):
        pass
    with pytest.raises(SavedCacheError, match="not a regular file"):
        Saved(path)


def test_links_to_files_are_followed_where_asked(tmp_path):
    (tmp_path / "a").write_text("x")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    with open_file(tmp_path / "b") as handle:
        assert os.read(handle, 9) == b"x"
    with pytest.raises(NoFileError), open_file(tmp_path / "b", follow=False):
        pass


@pytest.mark.parametrize("verify", [False, True])
def test_a_file_that_is_cut_short_while_it_is_read(tmp_path, monkeypatch, verify):
    """Mapped, that would end the process."""
    path = tmp_path / "a.kv"
    save(path)
    calls = []

    def cut(handle, data, offset):
        calls.append(1)
        if len(calls) == 3:  # the first tensor
            os.truncate(path, path.stat().st_size - 4000)
        read_into(handle, data, offset)

    cache = cache_of("keep_all")
    monkeypatch.setattr(snapshot, "read_into", cut)
    with pytest.raises(SavedCacheError, match=r"too early|bytes of"):
        Saved(path, verify=verify).restore_to(cache)
    assert cache.fed == 0


def test_a_file_that_is_replaced_between_header_and_tensors(tmp_path):
    path = tmp_path / "a.kv"
    save(path)
    saved = Saved(path, verify=False)
    save(path, notes={"other": "x"})
    with pytest.raises(SavedCacheError, match="has changed since"):
        saved.restore_to(cache_of("keep_all"))


def test_more_than_memory_holds_is_refused_before_it_is_taken(tmp_path, monkeypatch):
    """A file with holes may claim any size."""
    path = tmp_path / "a.kv"
    save(path)
    monkeypatch.setattr(snapshot, "free_bytes", lambda device: 1000)
    with pytest.raises(SavedCacheError, match="1000 bytes of memory are free"):
        Saved(path)


def test_a_header_that_nobody_would_read_is_not_written(tmp_path):
    with pytest.raises(SavedCacheError, match="save fewer notes"):
        save(tmp_path / "a.kv", notes={"x": "y" * (1 << 24)})
    assert list(tmp_path.iterdir()) == []


def test_no_space(tmp_path, monkeypatch):
    save(tmp_path / "a.kv")
    before = (tmp_path / "a.kv").read_bytes()

    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(atomic.os, "write", full)
    with pytest.raises(SavedCacheError, match="No space left"):
        save(tmp_path / "a.kv", notes={"more": "x"})
    assert (tmp_path / "a.kv").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["a.kv"]


@dataclass
class Header:
    name: str
    notes: dict[str, str]


def test_headers_hold_no_half_of_a_surrogate_pair():
    """JSON can spell it, but neither a file nor an index could hold it."""
    assert typed(Header, {"name": "\U0001f5fc", "notes": {}}).name == "\U0001f5fc"
    for name, note in (("\ud800", "x"), ("x", "\udfff")):
        with pytest.raises(TypeError, match="surrogate"):
            typed(Header, {"name": name, "notes": {"a": note}})


def test_tensors_that_overlap_are_refused():
    one = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    text = json.dumps({"a": one, "b": one}).encode()
    with pytest.raises(ValueError, match="tensor b begins at 0, not 8"):
        Layout.read(len(text).to_bytes(8, "little") + text + bytes(8), 1 << 16)
