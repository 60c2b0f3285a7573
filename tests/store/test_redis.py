"""Redis: constant round trips, a server that evicts, and servers that fail in every way."""

from __future__ import annotations

import multiprocessing
import signal
import socket
import sys
import threading
import time
from contextlib import suppress

import pytest
import redis.connection
import torch
from support.redis_server import Server
from support.store_places import blocks_of, found, put
from support.tiny_models import tiny
from support.token_caches import fed

import kvkeep
from kvkeep.errors import SpecError, UnsupportedError
from kvkeep.store import PrefixStore, Redis
from kvkeep.store import backend as backend_module
from kvkeep.store import redis as module
from kvkeep.store.block import beginning, digest
from kvkeep.store.entries import Entries
from kvkeep.store.exchange import Exchange

TEXT = list(range(40))  # five blocks


@pytest.fixture(scope="module")
def _server(tmp_path_factory):
    with Server(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def server(_server):
    """An empty server, for tests that do it no harm."""
    _server.client().flushall()
    return _server


@pytest.fixture
def mortal(tmp_path):
    """A server of a test's own."""
    with Server(tmp_path) as server:
        yield server


@pytest.fixture
def short_rest(monkeypatch):
    monkeypatch.setattr(backend_module, "REST_S", 0.3)


def eventually(ask, seconds=30):
    """Whether something comes true."""
    end = time.time() + seconds
    while time.time() < end:
        if ask():
            return True
        time.sleep(0.05)
    return False


def there(server, name="kvkeep"):
    """The keys of the blocks that are there, and their bytes."""
    client, base = server.client(), f"{name}:block:"
    found = {key.decode(): client.strlen(key) for key in client.keys(base + "*")}
    return {key.removeprefix(base): size for key, size in found.items()}


@pytest.mark.parametrize("blocks", [2, 60])
def test_round_trips_do_not_grow_with_the_prompt(server, monkeypatch, blocks):
    round_trips, tokens = [], list(range(8 * blocks))
    send = redis.connection.AbstractConnection.send_packed_command

    def counting(connection, command, *args, **kwargs):
        round_trips.append(command)
        return send(connection, command, *args, **kwargs)

    cache, backend = fed(tokens), Redis(server.url)
    put(backend, [5])  # greets the server
    monkeypatch.setattr(redis.connection.AbstractConnection, "send_packed_command", counting)
    PrefixStore(backend=backend, block=8).insert("m", torch.tensor(tokens), cache)
    assert len(round_trips) == 2  # what is missing, and to put it
    round_trips.clear()
    assert found(backend, tokens) == len(tokens)
    assert len(round_trips) == 2  # what is there, and to get it
    round_trips.clear()
    assert found(backend, [*tokens, 3]) == len(tokens)
    assert len(round_trips) == 3  # also what else begins like the rest
    round_trips.clear()
    assert found(backend, [*tokens[:-1], 3]) == len(tokens) - 1
    assert len(round_trips) == 6  # and how it goes on, its size, and to get it
    calls = {name: stats["calls"] for name, stats in server.client().info("commandstats").items()}
    assert "cmdstat_keys" not in calls
    assert "cmdstat_scan" not in calls


def test_round_trips_are_bounded(server, monkeypatch):
    monkeypatch.setattr(module, "_BATCH_BYTES", 4000)
    assert put(Redis(server.url), TEXT) == 40
    assert found(Redis(server.url), TEXT) == 40
    assert len(there(server)) == 5


def test_what_is_too_large_is_refused(server, monkeypatch):
    blocks = blocks_of(TEXT)
    size = len(blocks[0].to_bytes())
    monkeypatch.setattr(module, "_MOST", size - 1)
    assert not Redis(server.url).put(blocks[0])
    assert there(server) == {}


def test_two_put_the_same(server):
    blocks = blocks_of(TEXT)
    first, second = Redis(server.url), Redis(server.url)
    assert first.put_all(blocks) == second.put_all(blocks) == 5
    assert len(there(server)) == 5


def test_gc_leaves_eviction_to_the_server(server):
    backend = Redis(server.url)
    put(backend, TEXT)
    with pytest.raises(SpecError, match=r"give no budget, and run .* maxmemory 10"):
        backend.gc(budget=10)
    assert backend.gc(older_than=0) == 0
    assert len(there(server)) == 5


def test_names_know_nothing_of_each_other(server):
    one, other = Redis(server.url, name="one"), Redis(server.url, name="other")
    put(one, TEXT)
    assert (found(one, TEXT), found(other, TEXT)) == (40, 0)
    assert (one.exists(), other.exists()) == (True, False)
    assert list(other.scan()) == []
    other.gc(older_than=0)
    assert len(there(server, "one")) == 5


def test_time_to_live(server):
    client, base = server.client(), "kvkeep:block:"
    blocks = blocks_of(TEXT)
    backend = Redis(server.url, ttl=1000)
    backend.put_all(blocks[:3])
    key = blocks[0].key
    assert 900_000 < client.pttl(base + key) <= 1_000_000
    client.pexpire(base + key, 100_000)
    assert backend.get(key, used=False)
    assert client.pttl(base + key) <= 100_000
    assert backend.get(key)
    assert client.pttl(base + key) > 900_000
    Redis(server.url).get(key)  # who has no opinion leaves it
    assert client.pttl(base + key) > 900_000

    for block in blocks[1:3]:
        client.pexpire(base + block.key, 1)
    time.sleep(0.05)
    assert backend.missing([block.key for block in blocks]) == [b.key for b in blocks[1:]]
    assert list(there(server)) == [key]


def test_a_second_is_a_life(server):
    backend = Redis(server.url, ttl=1)
    put(backend, TEXT)
    assert len(there(server)) == 5
    assert eventually(lambda: not server.client().keys("*"))
    assert backend.nbytes == 0


def test_a_listing_of_many_keys(server):
    backend = Redis(server.url)
    keys = [f"{part:064x}/{number:064x}/{0:072x}" for part in range(4) for number in range(300)]
    client = server.client()
    client.mset({f"kvkeep:block:{key}": b"x" for key in keys})
    client.mset({f"other:{number}": b"x" for number in range(3000)})
    start = keys[700][:40]
    assert sorted(backend.scan(start)) == sorted(key for key in keys if key[:40] == start)
    assert sorted(backend.scan()) == sorted(keys)
    assert list(backend.scan("*")) == []


def test_of_blocks_that_begin_alike_the_newest_are_remembered(server, monkeypatch):
    monkeypatch.setattr(module, "_ALIKE", 3)
    backend, blocks = Redis(server.url), blocks_of(*([1, end] for end in range(6)))
    backend.put_all(blocks)
    start = blocks[0].key[:-64]
    assert list(backend.scan(start)) == [block.key for block in blocks[:2:-1]]
    backend.delete(blocks[4].key)
    assert list(backend.scan(start)) == [blocks[5].key, blocks[3].key]
    assert len(list(backend.scan())) == 5


@pytest.mark.parametrize("use", ["get", "leading", "scan"])
def test_blocks_the_server_dropped_are_misses(server, use):
    blocks = blocks_of(TEXT)
    backend, keys = Redis(server.url), [block.key for block in blocks]
    backend.put_all(blocks)
    gone = keys[1:3]
    server.client().delete(*(f"kvkeep:block:{key}" for key in gone))
    if use == "get":
        assert [key for key in keys if backend.get(key) is None] == gone
    elif use == "leading":
        assert len(backend.leading(keys)) == 1
        assert found(backend, TEXT) == 8
        assert backend.put_all(blocks[1:3]) == 2
        assert found(backend, TEXT) == 40
    else:
        assert sorted(backend.scan()) == sorted(set(keys) - set(gone))
    assert backend.failures == 0


def test_a_server_that_evicts_by_itself(mortal):
    client, backend = mortal.client(), Redis(mortal.url)
    blocks = blocks_of(list(range(400)), block=1)
    client.mset({f"other:{number}": bytes(20_000) for number in range(100)})
    client.config_set("maxmemory-policy", "allkeys-lru")
    client.config_set("maxmemory", client.info("memory")["used_memory"])
    for block in blocks:
        assert backend.put(block)
        got = backend.get(block.key)
        assert got is None or got.tokens.equal(block.tokens)
    assert client.info("stats")["evicted_keys"] > 0
    assert backend.failures == 0


def test_a_server_that_is_full(mortal):
    backend, blocks = Redis(mortal.url), blocks_of(*([first] * 8 for first in range(100)))
    assert backend.put_all(blocks[:90]) == 90
    mortal.client().config_set("maxmemory-policy", "noeviction")
    mortal.client().config_set("maxmemory", 1)
    assert backend.put_all(blocks[90:]) == 0
    assert "maxmemory" in backend.last_error
    assert not backend.resting
    assert found(backend, [5] * 8) == 8
    backend.delete(blocks[0].key)
    assert backend.gc() == 0
    mortal.client().config_set("maxmemory", 0)
    assert backend.put_all(blocks[90:]) == 10


def test_names_that_are_taken_by_something_else(server):
    client, blocks = server.client(), blocks_of(TEXT)
    backend = Redis(server.url)
    backend.put_all(blocks)
    for block, kind in zip(blocks, (client.lpush, client.sadd), strict=False):
        name = f"kvkeep:block:{block.key}"
        client.delete(name)
        kind(name, "x")
    assert found(backend, TEXT) == 0
    assert backend.get(blocks[1].key) is None
    assert put(Redis(server.url), TEXT) == 40
    assert found(backend, TEXT) == 40
    assert backend.failures == 0

    (block,) = blocks_of([9] * 8)
    client.set(f"kvkeep:alike:{block.key[:-64]}", "mine")
    assert backend.put(block)
    assert backend.failures == 0
    assert found(backend, [9] * 8) == 8


def test_quarantine_has_an_end(server):
    (block,) = blocks_of(TEXT[:8])
    backend = Redis(server.url)
    backend.put(block)
    server.client().set(f"kvkeep:block:{block.key}", b"damaged")
    assert backend.get(block.key) is None
    (name,) = server.client().keys("kvkeep:quarantine:*")
    assert 0 < server.client().ttl(name) <= 24 * 3600
    assert there(server) == {}
    assert list(backend.scan(block.key[:-64])) == []


def test_a_dead_server(short_rest):
    """One failure, not one for each block; and the text that is generated is the same."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        backend = Redis(f"redis://127.0.0.1:{unused.getsockname()[1]}")
    assert found(backend, TEXT) == 0
    assert backend.failures == 1
    assert put(backend, TEXT) == 40
    assert backend.failures == 1
    assert "ConnectionError" in backend.last_error
    assert backend.labels(["a/b/c"]) == [None]
    assert (list(backend.scan()), backend.nbytes, backend.gc()) == ([], 0, 0)
    assert backend.failures == 1
    assert eventually(lambda: not backend.resting)
    assert not backend.exists()
    assert backend.failures == 2

    model, prompt = tiny("llama"), torch.arange(2, 30)[None]
    with kvkeep.attach(model, store=PrefixStore(backend=backend, block=8)):
        given = model.generate(prompt, max_new_tokens=4, do_sample=False)
    assert given.equal(model.generate(prompt, max_new_tokens=4, do_sample=False))


def test_a_server_that_does_not_answer(mortal, short_rest):
    backend = Redis(mortal.tcp, timeout=0.3)
    put(backend, TEXT)
    mortal.send(signal.SIGSTOP)
    assert found(backend, TEXT) == 0
    assert backend.failures == 1
    assert "imeout" in backend.last_error
    fresh = Redis(mortal.tcp, timeout=0.3)
    assert found(fresh, TEXT) == 0
    assert "imeout" in fresh.last_error
    mortal.send(signal.SIGCONT)
    assert eventually(lambda: found(backend, TEXT) == 40)
    assert eventually(lambda: found(fresh, TEXT) == 40)


def test_a_server_that_starts_again(mortal, short_rest):
    backend = Redis(mortal.tcp)
    put(backend, TEXT)
    mortal.kill()
    assert found(backend, TEXT) == 0
    mortal.start()
    assert eventually(lambda: put(backend, TEXT) and found(backend, TEXT) == 40)
    failures = backend.failures
    mortal.kill()
    mortal.start()
    assert put(backend, TEXT) == 40  # an idle connection that is closed is no failure
    assert found(backend, TEXT) == 40
    assert backend.failures == failures


class Between:
    """Stands between a client and a server, until so many bytes went one way; then everything
    stops: the connection is cut, or nothing comes any more."""

    def __init__(self, port, cut):
        self._port, self._cut = port, cut
        self.limit = {"up": None, "down": None}
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"redis://127.0.0.1:{self._socket.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self):
        while True:
            try:
                client, _ = self._socket.accept()
            except OSError:
                return
            server = socket.create_connection(("127.0.0.1", self._port))
            for way, source, sink in (("up", client, server), ("down", server, client)):
                threading.Thread(target=self._pass, args=(way, source, sink), daemon=True).start()

    def _pass(self, way, source, sink):
        with suppress(OSError):
            while data := source.recv(4096):
                left = self.limit[way]
                if left is not None:
                    self.limit[way] = max(0, left - len(data))
                sink.sendall(data[:left])
                if left is not None and left < len(data):
                    if not self._cut:
                        time.sleep(60)
                    break
        for each in (source, sink):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def close(self):
        self._socket.close()


@pytest.mark.parametrize(
    ("bytes_that_pass", "cut"),
    [
        *((0, True), (30, True), (6000, True), (6000, False)),
        pytest.param(0, False, marks=pytest.mark.slow),
    ],
)
def test_a_server_that_dies_in_the_middle(server, short_rest, cut, bytes_that_pass):
    put(Redis(server.url), TEXT)
    between = Between(server.port, cut)
    try:
        backend = Redis(between.url, timeout=0.3)
        assert found(backend, TEXT) == 40
        between.limit["down"] = bytes_that_pass
        assert found(backend, TEXT) == 0
        assert backend.failures == 1
        between.limit["down"] = None
        assert eventually(lambda: found(backend, TEXT) == 40)

        other = [100 + token for token in TEXT]
        between.limit["up"] = bytes_that_pass
        failures = backend.failures
        assert put(backend, other) == 40
        assert backend.failures == failures + 1
        between.limit["up"] = None
        assert found(Redis(server.url), other) in range(0, 41, 8)
        assert eventually(lambda: put(backend, other) and found(backend, other) == 40)
        assert len(there(server)) == 10
        assert backend.damaged == 0
    finally:
        between.close()


@pytest.mark.parametrize(
    "answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b":x\r\n", b"$9\r\nabc\r\n"]
)
def test_a_server_of_something_else(answer):
    listening = socket.create_server(("127.0.0.1", 0))

    def serve():
        while True:
            try:
                client, _ = listening.accept()
                client.recv(4096)
                client.sendall(answer)
            except OSError:
                return

    threading.Thread(target=serve, daemon=True).start()
    backend = Redis(f"redis://127.0.0.1:{listening.getsockname()[1]}", timeout=0.3)
    assert found(backend, TEXT) == 0
    assert put(backend, TEXT) == 40
    assert backend.failures == 1
    listening.close()


def _in_child(backend, results):
    results.put((found(backend, TEXT), put(backend, [8] * 8), backend.failures))


def test_a_fork_has_its_own_connections(server):
    backend = Redis(server.url)
    put(backend, TEXT)
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    children = [context.Process(target=_in_child, args=(backend, results)) for _ in range(3)]
    for child in children:
        child.start()
    for _ in range(20):
        assert found(backend, TEXT) == 40
    for child in children:
        assert results.get(timeout=60) == (40, 8, 0)
        child.join()
    assert backend.failures == 0


def test_passwords(tmp_path):
    with Server(tmp_path) as server:
        client = server.client()
        client.config_set("requirepass", "right")
        right = Redis(f"redis://:right@127.0.0.1:{server.port}")
        assert put(right, TEXT) == 40
        assert found(right, TEXT) == 40
        for url in (f"redis://:secret@127.0.0.1:{server.port}", server.tcp):
            wrong = Redis(url)
            assert found(wrong, TEXT) == 0
            assert wrong.failures == 1
            assert "secret" not in wrong.last_error
        client.config_set("requirepass", "")


def test_valkey_is_redis(server):
    backend = Redis(server.tcp.replace("redis", "valkey"))
    assert put(backend, TEXT) == 40
    assert found(Redis(server.url), TEXT) == 40


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"url": "http://localhost"}, "scheme 'http'"),
        ({"url": "localhost:6379"}, "scheme 'localhost:6379'"),
        ({"url": "redis://localhost:port"}, "redis://host:port/0"),
        ({"url": "redis://localhost?colour=red"}, "colour"),
        ({"url": "redis://localhost?db=x"}, "db"),
        ({"budget": 5}, "maxmemory 5"),
        ({"ttl": 0}, "ttl of 0 seconds"),
        ({"ttl": float("nan")}, "ttl of nan seconds"),
        ({"timeout": 0}, "timeout of 0 seconds"),
        ({"timeout": float("inf")}, "timeout of inf"),
        ({"name": ""}, "name ''"),
        ({"name": "a*"}, "name 'a\\*'"),
    ],
)
def test_bad_input(options, message):
    with pytest.raises(SpecError, match=message):
        Redis(**{"url": "redis://localhost"} | options)


def test_without_the_client(monkeypatch):
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(UnsupportedError, match=r"pip install 'kvkeep\[redis\]'"):
        Redis("redis://localhost")


@pytest.mark.parametrize("call", ["get", "leading", "missing", "contains", "scan", "delete"])
def test_an_answer_that_never_ends_has_a_deadline(call):
    """A byte now and then is an answer that goes on, as far as any single step can tell."""
    listening = socket.create_server(("127.0.0.1", 0))

    def serve():
        with suppress(OSError):
            while True:
                client, _ = listening.accept()
                with suppress(OSError):
                    client.sendall(b"+")
                    while True:
                        client.sendall(b"x")
                        time.sleep(0.01)

    threading.Thread(target=serve, daemon=True).start()
    url = f"redis://127.0.0.1:{listening.getsockname()[1]}"
    backend = Redis(url, timeout=0.5, deadline=0.2)
    keys = [block.key for block in blocks_of(TEXT)]
    before = time.monotonic()
    found = getattr(backend, call)(*([keys] if call in ("leading", "missing") else keys[:1]))
    assert not (list(found) if call == "scan" else found)
    assert 0.2 <= time.monotonic() - before < 5
    assert backend.resting
    assert "Timeout" in backend.last_error
    listening.close()


def _late(backend, monkeypatch, answer):
    """Answer each round trip within its timeout, but slowly; returns the list of round trips."""
    round_trips = []

    def piped(commands):
        round_trips.append(commands)
        assert len(round_trips) < 200, "it goes on and on"
        time.sleep(0.02)
        return [answer(command, len(round_trips)) for command in commands]

    monkeypatch.setattr(backend._server, "pipeline", piped)
    return round_trips


def test_pages_that_never_end(server, monkeypatch):
    backend = Redis(server.url)
    monkeypatch.setattr(module, "_MOST_PAGES", 10)
    round_trips = _late(backend, monkeypatch, lambda _, turn: (turn, [b"kvkeep:block:x"]))
    assert list(backend.scan()) == []
    assert len(round_trips) == 10


def test_what_begins_alike_is_looked_for_in_the_time_of_one_call(server, monkeypatch):
    identity, prefix, tokens = (
        "m",
        digest(torch.tensor([], dtype=torch.int64)),
        torch.tensor([1, 2]),
    )
    put(Redis(server.url), [1, 3])
    backend = Redis(server.url, deadline=0.05)
    start = beginning(identity, prefix, 1)
    keys = [f"{start}{number:064x}" for number in range(16)]

    def answer(command, _):
        return [key[-64:].encode() for key in keys] if command[0] == "ZREVRANGE" else b"x"

    _late(backend, monkeypatch, answer)
    assert Exchange(Entries(None), backend, 8)._alike(identity, prefix, tokens) is None
    assert "Timeout" in backend.last_error


def test_labels_that_cannot_be_read(server, monkeypatch):
    """Each needs a look at its block, all in the time of one call."""
    monkeypatch.setattr(Redis, "_LABELS", 1)
    backend = Redis(server.url, deadline=0.3)
    keys = [block.key for block in blocks_of(list(range(8 * 90)))]
    _late(backend, monkeypatch, lambda command, _: b"x")
    assert backend.labels(keys) == [None] * 90
    assert "Timeout" in backend.last_error


def test_a_block_larger_than_the_free_memory(server, monkeypatch):
    """It is not asked for."""
    backend = Redis(server.url)
    put(backend, TEXT)
    keys = list(backend.scan())
    assert backend.get(keys[0]) is not None
    monkeypatch.setattr(backend_module, "free_bytes", lambda _: 100)
    monkeypatch.setattr(backend, "_data", None)
    assert backend.get(keys[0]) is None
    assert backend.leading(keys) == []
    assert "MemoryError" in backend.last_error
    assert not backend.resting


def test_a_large_answer_in_time(server):
    """The deadline is for all of a call, not a limit of its bytes."""
    backend = Redis(server.tcp, deadline=30)
    blocks = blocks_of(list(range(2000)), block=500)
    assert backend.put_all(blocks) == 4
    assert len(backend.leading([block.key for block in blocks])) == 4
    assert backend.failures == 0


ANSWERS = [
    None, b"", b"x", 0, 1, -1, 2**70, [], [b""], [b"a", b"a"], [1, 2], (0, [b"x"]), (7, [1]),
    [[b"x"]], [None], {}, True, 1.5, redis.exceptions.ResponseError("WRONGTYPE x"),
    redis.exceptions.ResponseError("OOM"), ValueError("x"),
]  # fmt: skip


@pytest.mark.parametrize("seed", range(3))
def test_answers_of_any_kind(server, monkeypatch, seed):
    """Of a server that is none, or another client's: never an exception, never a block."""
    import random

    draw = random.Random(seed)
    blocks = blocks_of(TEXT)
    keys = [block.key for block in blocks]
    monkeypatch.setattr(backend_module, "REST_S", 0.0)
    backend = Redis(server.url)
    turns = []

    def answers(commands):
        turns.append(1)
        if len(turns) % 50 == 0:
            raise draw.choice([OSError("x"), redis.exceptions.InvalidResponse("y"), EOFError()])
        given = [draw.choice(ANSWERS) for _ in commands]
        return given if draw.random() < 0.9 else given[: draw.randrange(3)]

    monkeypatch.setattr(backend._server, "pipeline", answers)
    for _ in range(60):
        assert backend.get(draw.choice(keys)) is None
        assert backend.leading(keys) == []
        backend.contains(keys[0])
        assert set(backend.missing(keys)) <= set(keys)
        backend.put_all(blocks)
        backend.delete(keys[0])
        assert list(backend.scan()) == []
        assert backend.labels(keys) == [None] * 5
        assert backend.gc() >= 0
        assert backend.nbytes >= 0
        backend.exists()
    assert len(turns) > 300


def test_a_megabyte_of_header_is_refused_at_once(server):
    """A header is bounded, and what is read of it is read once: no loops within loops."""
    import json

    from kvkeep.files.headers import sealed

    key = blocks_of(TEXT)[0].key
    likes = [[1, 1, 1, "torch.float32"]] * 8000
    checksums = {f"{index}.k": "0" * 32 for index in range(4000)}
    inner = {"format": 3, "identity": "m", "prefix": "", "routed": None, "compressed": False}
    inner |= {"likes": likes, "checksums": checksums}
    outer = {"__metadata__": sealed("kvkeep_block", inner)}
    outer |= {
        f"{index}.k": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]} for index in range(4000)
    }
    text = json.dumps(outer).encode()
    data = [
        len(text).to_bytes(8, "little") + text,
        (2**20).to_bytes(8, "little") + b"[" * 2**20,
        (500_000).to_bytes(8, "little") + b'{"a":[' * 83_333 + b"  " + bytes(2**19),
        (500_000).to_bytes(8, "little") + (b"[" + b"{}," * 166_000)[:499_999] + b"]" + bytes(2**19),
    ]
    backend = Redis(server.url)
    for value in data:
        server.client().set(f"kvkeep:block:{key}", value)
        counted = _lines_run(lambda: backend.get(key))
        assert counted < len(value)
    assert backend.damaged == 4


def _lines_run(call):
    """How many lines of Python a call runs, which no clock disturbs."""
    counted = [0]

    def tracer(frame, event, argument):
        counted[0] += event == "line"
        return tracer

    sys.settrace(tracer)
    try:
        assert call() is None
    finally:
        sys.settrace(None)
    return counted[0]
