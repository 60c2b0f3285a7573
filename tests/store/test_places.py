"""Which backend a path or a URL names."""

from __future__ import annotations

import pytest
from support.redis_server import Server
from support.store_places import put

from kvkeep.errors import SpecError, StateError
from kvkeep.store import Disk, Location, Redis, opened
from kvkeep.store.open_url import shown


def test_kinds(tmp_path):
    assert isinstance(opened(tmp_path / "a", budget=5), Disk)
    assert isinstance(opened(f"{tmp_path}/b"), Disk)
    for url in ("redis://h", "rediss://h:1/2", "unix:///s", "valkey://h", "valkeys://h"):
        assert isinstance(opened(url, ttl=5, timeout=1), Redis)
    for url in (f"file://{tmp_path}/c", "memory://d"):
        assert isinstance(opened(url, budget=7), Location)
    assert opened("redis://h", budget=7).budget == opened("memory://d", budget=7).budget == 7
    with pytest.raises(SpecError, match=r"'s4' is unknown; give a directory, redis, .*s3://"):
        opened("s4://bucket")


def test_a_store_that_is_not_there(tmp_path):
    """Is not made by a typo."""
    for where in (tmp_path / "a", f"file://{tmp_path}/a", "memory://nothing"):
        with pytest.raises(SpecError, match="no store at"):
            opened(where, create=False)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("x")
    with pytest.raises(SpecError, match="no store at"):
        opened(tmp_path / "file", create=False)
    with pytest.raises(StateError, match=r"redis://127.0.0.1:1 does not answer: .*refused"):
        opened("redis://me:secret@127.0.0.1:1", create=False)


@pytest.mark.parametrize("kind", [Disk, Location])
def test_a_store_that_is_there(tmp_path, kind):
    where = tmp_path / "a" if kind is Disk else f"file://{tmp_path}/a"
    put(opened(where), [1, 2])
    assert isinstance(opened(where, create=False), kind)


def test_names_in_urls(tmp_path):
    with Server(tmp_path) as server:
        with pytest.raises(SpecError, match="no store at"):
            opened(server.url, create=False)
        put(opened(server.url + "?name=chats"), [1, 2])
        with pytest.raises(SpecError, match="no store at"):
            opened(server.url, create=False)
        there = opened(server.url + "?db=0&name=chats", create=False)
        assert len(list(there.scan())) == 1
        assert len(list(opened(server.url, name="chats").scan())) == 1


def test_nobodys_password_is_shown():
    assert shown("redis://me:secret@host:1/0") == "redis://host:1/0"
    assert shown("redis://:a@b@host") == "redis://host"
    assert shown("/path/a@b") == "/path/a@b"
