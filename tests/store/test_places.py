"""Which backend a path or a URL names."""

from __future__ import annotations

import pytest
from support.redis_server import Server
from support.store_places import put

from kvkeep import store
from kvkeep.errors import SpecError, StateError
from kvkeep.store import Disk, Location, Memory, Redis, open_store
from kvkeep.store.open_store import shown


def test_kinds(tmp_path):
    assert isinstance(open_store(tmp_path / "a", budget=5), Disk)
    assert isinstance(open_store(f"{tmp_path}/b"), Disk)
    for url in ("redis://h", "rediss://h:1/2", "unix:///s", "valkey://h", "valkeys://h"):
        assert isinstance(open_store(url, ttl=5, timeout=1), Redis)
    for url in (f"file://{tmp_path}/c", "memory://d"):
        assert isinstance(open_store(url, budget=7), Location)
    assert open_store("memory://d", budget=7).budget == 7
    with pytest.raises(SpecError, match=r"'s4' is unknown; give a directory, .*redis, .*s3://"):
        open_store("s4://bucket")


def test_servers_have_limits_of_their_own():
    with pytest.raises(SpecError, match=r"give no budget, and run .* maxmemory 7.*allkeys-lru"):
        open_store("redis://h", budget=7)
    with pytest.raises(SpecError, match=r"LMCache's server enforces none; call gc\(budget=...\)"):
        open_store("lm://h:1", budget=7)


def test_a_backend_of_ones_own(tmp_path):
    class Own(Memory):
        name = "own"
        schemes = ("own",)

        def __init__(self, url, name="none"):
            super().__init__()
            self.url, self.given = url, name

    backend = open_store("own://place?name=chats")
    assert (type(backend), backend.url, backend.given) == (Own, "own://place", "chats")


def test_the_old_name_of_open_store():
    for use in ("from kvkeep.store import opened", "import kvkeep; kvkeep.store.opened('x')"):
        with pytest.raises(
            ImportError, match=r"kvkeep.store.opened is now kvkeep.store.open_store"
        ):
            exec(use, {})
    with pytest.raises(AttributeError, match="has no attribute 'other'"):
        _ = store.other


def test_a_store_that_is_not_there(tmp_path):
    """Is not made by a typo."""
    for where in (tmp_path / "a", f"file://{tmp_path}/a", "memory://nothing"):
        with pytest.raises(SpecError, match="no store at"):
            open_store(where, create=False)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("x")
    with pytest.raises(SpecError, match="no store at"):
        open_store(tmp_path / "file", create=False)
    with pytest.raises(StateError, match=r"redis://127.0.0.1:1 does not answer: .*refused"):
        open_store("redis://me:secret@127.0.0.1:1", create=False)


@pytest.mark.parametrize("kind", [Disk, Location])
def test_a_store_that_is_there(tmp_path, kind):
    where = tmp_path / "a" if kind is Disk else f"file://{tmp_path}/a"
    put(open_store(where), [1, 2])
    assert isinstance(open_store(where, create=False), kind)


def test_names_in_urls(tmp_path):
    with Server(tmp_path) as server:
        with pytest.raises(SpecError, match="no store at"):
            open_store(server.url, create=False)
        put(open_store(server.url + "?name=chats"), [1, 2])
        with pytest.raises(SpecError, match="no store at"):
            open_store(server.url, create=False)
        there = open_store(server.url + "?db=0&name=chats", create=False)
        assert len(list(there.scan())) == 1
        assert len(list(open_store(server.url, name="chats").scan())) == 1


def test_nobodys_password_is_shown():
    assert shown("redis://me:secret@host:1/0") == "redis://host:1/0"
    assert shown("redis://:a@b@host") == "redis://host"
    assert shown("/path/a@b") == "/path/a@b"
