"""LMCache: its server's protocol, spoken to a small server of it here and, if slow, to its own."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import sysconfig
import threading
import time
import uuid
from contextlib import suppress
from pathlib import Path

import pytest
import torch

# What all backends do is collected here again, for the fixture `backend` below.
from store.test_backends import (  # noqa: F401
    test_another_store_finds_every_token,
    test_calls,
    test_keys_that_are_no_blocks,
    test_random_workloads,
    test_shared_blocks_are_written_once,
    test_the_longest_of_blocks_that_begin_alike,
)
from store.test_redis import Between, eventually
from support.store_places import blocks_of, damaged, found, found_in, put, text
from support.tiny_models import tiny
from support.token_caches import fed

import kvkeep
from kvkeep.errors import SpecError, StateError
from kvkeep.store import LMCache, PrefixStore, open_store
from kvkeep.store import backend as backend_module
from kvkeep.store import lmcache as module

TEXT = list(range(40))  # five blocks
PUT, GET, EXIST = 1, 2, 3


class Fake:
    """A server that speaks as LMCache's does: it answers no PUT, keeps what a client sent half as
    if it were there, and hangs up on whoever asks for that."""

    def __init__(self, port=0):
        self.values = {}
        self.heads = []
        self._clients = []
        self._listening = socket.create_server(("127.0.0.1", port))
        self.port = self._listening.getsockname()[1]
        self.url = f"lm://127.0.0.1:{self.port}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self):
        with suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._clients.append(client)
                threading.Thread(target=self._talk, args=(client,), daemon=True).start()

    def _talk(self, client):
        with client, suppress(OSError):
            while (head := read(client, 186)) is not None:
                self.heads.append(head)
                command, length, *kind, name = struct.unpack("<9i150s", head)
                model, *ranks, own, dtype = name.decode().strip().split("@")
                key = (model, *map(int, ranks), int(own, 16), dtype)
                if command == PUT:
                    assert kind == [5, 6, 0, length, 0, 0, 0]
                    self.values[key] = (length, read(client, length))
                elif key not in self.values:
                    client.sendall(struct.pack("<9i", 400, 0, 1, 2, 0, 0, 0, 0, 0))
                elif command == EXIST:
                    client.sendall(struct.pack("<9i", 200, 0, 1, 2, 0, 0, 0, 0, 0))
                else:
                    length, data = self.values[key]
                    client.sendall(struct.pack("<9i", 200, length, 5, 6, length, 0, 0, 0, 0))
                    if data is None:
                        return
                    client.sendall(data)

    def kill(self):
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        for client in self._clients:
            with suppress(OSError):
                client.shutdown(socket.SHUT_RDWR)

    def start(self):
        self.__init__(self.port)


class Real:
    """LMCache's own server."""

    def __init__(self, python):
        self._python = python
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"lm://127.0.0.1:{self.port}"
        self.start()

    def start(self):
        command = [self._python, "-m", "lmcache.v1.server", "127.0.0.1", str(self.port), "cpu"]
        quiet = {"LMCACHE_TRACK_USAGE": "false", "LMCACHE_LOG_LEVEL": "ERROR"}
        null = subprocess.DEVNULL
        self._process = None
        end = time.time() + 120
        while time.time() < end:
            if self._process is None or self._process.poll() is not None:
                # Its port is taken for a minute after one that was killed.
                self._process = subprocess.Popen(
                    command, env=os.environ | quiet, stdout=null, stderr=null
                )
            with suppress(OSError):
                return socket.create_connection(("127.0.0.1", self.port)).close()
            time.sleep(0.1)
        raise RuntimeError("LMCache's server did not start")

    def send(self, number):
        self._process.send_signal(number)

    def kill(self):
        self._process.kill()
        self._process.wait()


def read(client, length):
    """So many bytes, or None."""
    data = b""
    while len(data) < length:
        part = client.recv(length - len(data))
        if not part:
            return None
        data += part
    return data


class Raw:
    """What lies in a server, as the backend's users never see it."""

    def __init__(self, backend):
        self._backend = backend

    def request(self, command, what, length=0):
        own = hashlib.sha256(what.encode()).hexdigest()[:32]
        name = f"{self._backend._client.model}@1@0@{own}@uint8".encode().ljust(150)
        return struct.pack("<9i150s", command, length, 5, 6, 0, length, 0, 0, 0, name)

    def get(self, what):
        with socket.create_connection(self._backend._client.address) as client:
            client.sendall(self.request(GET, what))
            code, length, *_ = struct.unpack("<9i", read(client, 36))
            return read(client, length) if code == 200 else None

    def put(self, what, data, length=None):
        """All of it, or the beginning of a longer value."""
        length = len(data) if length is None else length
        with socket.create_connection(self._backend._client.address) as client:
            client.sendall(self.request(PUT, what, length) + data)
            if length == len(data):
                client.sendall(self.request(EXIST, what))
                read(client, 36)
            else:
                client.shutdown(socket.SHUT_WR)
                client.recv(1)  # until the server hangs up


@pytest.fixture(scope="session")
def python(tmp_path_factory):
    """An interpreter that has LMCache: the one that is named, or one that has this one's torch."""
    named = os.environ.get("KVKEEP_LMCACHE_PYTHON")
    if named:
        return named
    place = tmp_path_factory.mktemp("lmcache")
    subprocess.run([sys.executable, "-m", "venv", place], check=True)
    own, purelib = place / "bin" / "python", {"base": str(place), "platbase": str(place)}
    packages = Path(sysconfig.get_path("purelib", vars=purelib))
    (packages / "torch.pth").write_text(sysconfig.get_path("purelib"))
    constraints = Path(__file__).parents[2] / "constraints.txt"
    needed = ["aiohttp", "cachetools", "numba", "prometheus_client", "py-cpuinfo"]
    for some in (["--no-deps", "lmcache==0.5.6"], needed):
        pip = [own, "-m", "pip", "install", "-q", "-c", constraints, *some]
        done = subprocess.run(pip, capture_output=True, text=True)
        if "No matching distribution" in done.stderr:
            pytest.skip(f"LMCache cannot be installed here: {done.stderr.splitlines()[-1]}")
        assert done.returncode == 0, done.stderr
    return str(own)


@pytest.fixture(scope="module", params=["fake", pytest.param("real", marks=pytest.mark.slow)])
def server(request):
    """A server, for tests that do it no harm."""
    fake = request.param == "fake"
    server = Fake() if fake else Real(request.getfixturevalue("python"))
    yield server
    server.kill()


@pytest.fixture
def client(server):
    """Of clients of a place of their own."""
    name = uuid.uuid4().hex
    return lambda url=server.url, **options: LMCache(url, name=name, **options)


@pytest.fixture
def backend(client):
    return client()


@pytest.fixture
def short_rest(monkeypatch):
    monkeypatch.setattr(backend_module, "REST_S", 0.3)


def test_what_is_sent():
    """To the byte, as LMCache 0.5.6 reads it."""
    server = Fake()
    LMCache(server.url).get("a/b/c")
    hashed = b"de1c52dc31a3512f21886e46f48b8f8b"
    name = b"kvkeep@1@0@" + hashed + b"@uint8"
    numbers = [2, 0, 5, 6, 0, 0, 0, 0, 0]
    head = b"".join(number.to_bytes(4, "little") for number in numbers) + name.ljust(150)
    assert server.heads == [head]
    server.kill()


def test_models_share_a_server(client):
    model, prompt = tiny("llama"), torch.arange(2, 40)

    def hits(namespace=""):
        store = PrefixStore(backend=client(), block=16)
        store.prefill(model, prompt, namespace=namespace)
        return store.stats().hit_tokens

    assert [hits(), hits()] == [0, 37]
    assert [hits("tenant"), hits("tenant")] == [0, 37]


def test_blocks_of_many_megabytes(client):
    (block,) = blocks_of(list(range(40_000)), block=40_000)
    assert len(block.to_bytes()) > 3_000_000
    assert client().put(block)
    assert client().get(block.key).tokens.equal(block.tokens)


def test_what_is_too_large_is_not_sent(client, monkeypatch):
    (block,) = blocks_of(TEXT[:8])
    monkeypatch.setattr(module, "_MOST", len(block.to_bytes()) - 1)
    backend = client()
    assert not backend.put(block)
    assert Raw(backend).get(f"block {block.key}") is None
    assert backend.failures == 0


def test_damage_is_a_miss(client):
    tokens, draw = TEXT[:20], random.Random(3)
    keys = [block.key for block in blocks_of(tokens)]
    for _ in range(20):
        backend = client()
        put(backend, tokens)
        what = f"block {draw.choice(keys)}"
        raw = Raw(backend)
        raw.put(what, damaged(raw.get(what), draw) or b"x")
        assert found(backend, tokens) < 20
        assert backend.damaged == 1
        assert raw.get(what) == b""
        assert not backend.contains(what.split()[1])
        assert put(backend, tokens) == 20
        assert found(backend, tokens) == 20
        assert backend.failures == 0


@pytest.mark.parametrize("foreign", [b"hello", b"PK\x03\x04" + bytes(50), bytes(8), b"\xff" * 99])
def test_foreign_bytes_are_a_miss(client, foreign):
    backend = client()
    put(backend, TEXT)
    for key in list(backend.scan()):
        Raw(backend).put(f"block {key}", foreign)
        Raw(backend).put(f"label {key}", foreign)
        assert backend.labels([key]) == [None]
    assert found(backend, TEXT) == 0
    assert put(client(), TEXT) == 40
    assert found(client(), TEXT) == 40


def test_another_keys_block_is_a_miss(client):
    backend, blocks = client(), blocks_of(TEXT[:16])
    put(backend, TEXT[:16])
    for block, other in zip(blocks, reversed(blocks), strict=True):
        Raw(backend).put(f"block {block.key}", other.to_bytes())
    assert found(backend, TEXT[:16]) == 0
    assert backend.damaged == 1


def test_labels_need_no_blocks(client):
    backend, (block,) = client(), blocks_of(TEXT[:8])
    backend.put(block)
    Raw(backend).put(f"block {block.key}", b"damaged")
    assert backend.put(block)  # it is there: nothing is sent
    assert Raw(backend).get(f"block {block.key}") == b"damaged"
    (label,) = backend.labels([block.key])
    assert label.tokens.equal(block.tokens)
    assert label.nbytes == len(block.to_bytes())


@pytest.mark.parametrize("data", [b"", b"\xff\x00 1 2\n", b"a 1 2\nb c d", b"a/b/c 1"])
def test_lists_that_are_lost_are_written_again(client, data):
    backend = client()
    put(backend, TEXT)
    keys = sorted(backend.scan())
    for number in {module._list_of(key) for key in keys}:
        assert Raw(backend).get(f"list {number}")
        Raw(backend).put(f"list {number}", data)
    assert backend.missing(keys) == keys
    assert found(backend, TEXT) == 40  # who knows the tokens needs no list
    assert put(backend, TEXT) == 40
    assert sorted(set(backend.scan()) - {"a"}) == keys
    assert backend.failures == 0


@pytest.mark.parametrize("kind", ["block", "label", "list"])
@pytest.mark.parametrize("sent", [0, 5])
def test_writers_that_died_on_the_way(client, kind, sent):
    """The server then hangs up on readers, who see that it is not dead."""
    backend, blocks = client(), blocks_of(TEXT)
    put(backend, TEXT)
    for block in blocks:
        what = f"list {module._list_of(block.key)}" if kind == "list" else f"{kind} {block.key}"
        Raw(backend).put(what, bytes(sent), length=5000)
    if kind == "label":
        assert backend.labels([block.key for block in blocks]) == [None] * 5
    elif kind == "list":
        assert backend.missing([block.key for block in blocks]) == [block.key for block in blocks]
    else:
        assert found(backend, TEXT) == 0
        assert [backend.get(block.key) for block in blocks] == [None] * 5
    assert (backend.failures, backend.damaged) == (0, 5)
    assert put(client(), TEXT) == 40
    assert found(client(), TEXT) == 40


def test_what_is_deleted_takes_no_room(client):
    backend, (block,) = client(), blocks_of(TEXT[:8])
    backend.put(block)
    backend.delete(block.key)
    raw = Raw(backend)
    assert raw.get(f"block {block.key}") == raw.get(f"label {block.key}") == b""
    assert (backend.get(block.key), backend.labels([block.key])) == (None, [None])
    assert list(backend.scan()) == []
    assert backend.damaged == 0
    assert backend.put(block)
    assert backend.get(block.key) is not None


def test_what_others_list_but_is_deleted(client):
    """As when two change a list at once."""
    backend, (block,) = client(), blocks_of(TEXT[:8])
    number = module._list_of(block.key)
    backend.put(block)
    before = Raw(backend).get(f"list {number}")
    backend.delete(block.key)
    Raw(backend).put(f"list {number}", before)
    assert backend.contains(block.key)
    assert backend.get(block.key) is None
    assert not backend.contains(block.key)
    assert backend.damaged == 0


def test_gc(client):
    """The oldest goes first."""
    backend, blocks = client(), blocks_of(*([first] * 8 for first in range(4)))
    blocks.sort(key=lambda block: block.key, reverse=True)
    for block in blocks:
        assert backend.put(block)
        time.sleep(0.01)
    size = len(blocks[0].to_bytes())
    assert backend.nbytes == 4 * size
    assert backend.gc() == 0
    assert backend.gc(budget=2 * size + 1) == 2 * size
    assert [backend.contains(block.key) for block in blocks] == [False, False, True, True]
    assert backend.nbytes == 2 * size
    with pytest.raises(SpecError, match="at least 1"):
        backend.gc(budget=0)


def test_what_follows_goes_first(client):
    """Of one prompt: blocks are of no use without those before them."""
    backend = client()
    put(backend, TEXT)
    backend.gc(budget=3 * backend.nbytes // 5)
    assert found(backend, TEXT) == 24


def test_the_latest_are_found_first(client):
    """A store looks at a few of those that begin alike."""
    backend, blocks = client(), blocks_of(*([1, last] for last in range(6)))
    for block in blocks:
        backend.put(block)
        time.sleep(0.01)
    keys = [block.key for block in reversed(blocks)]
    assert list(backend.scan(keys[0][:74])) == list(backend.scan()) == keys
    assert len({module._list_of(key) for key in keys}) > 1


def test_names_know_nothing_of_each_other(server):
    one, other = (LMCache(server.url, name=uuid.uuid4().hex) for _ in range(2))
    put(one, TEXT)
    assert (found(one, TEXT), found(other, TEXT)) == (40, 0)
    assert (one.exists(), other.exists()) == (True, False)
    assert list(other.scan()) == []


def test_urls(server):
    name = uuid.uuid4().hex
    url = f"{server.url}?name={name}"
    with pytest.raises(SpecError, match=r"no store at lm://127.0.0.1:\d+\?name="):
        open_store(url, create=False)
    put(open_store(url, timeout=5), TEXT)
    assert isinstance(open_store(url, create=False), LMCache)
    assert len(list(open_store(server.url, name=name).scan())) == 5
    with pytest.raises(SpecError, match="a budget of 5 bytes"):
        open_store(url, budget=5)
    with pytest.raises(StateError, match=r"lm://127.0.0.1:1 does not answer: .*refused"):
        open_store("lm://127.0.0.1:1", create=False)


def test_threads(client, monkeypatch):
    """Of one backend, and of one key at once: none of them loses what another lists."""
    monkeypatch.setattr(module, "_LISTS", 1)
    backend, errors = client(), []
    start = threading.Barrier(6)

    def work(seed):
        try:
            draw = random.Random(seed)
            start.wait()
            put(backend, TEXT)
            for _ in range(8):
                tokens = text(draw)
                put(backend, tokens)
                assert found(backend, tokens) == len(tokens)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    assert (backend.failures, backend.damaged) == (0, 0)
    texts = [text(draw) for draw in map(random.Random, range(6)) for _ in range(8)]
    assert set(backend.scan()) == {block.key for block in blocks_of(TEXT, *texts)}


def _work(backend, seed, seconds, failures, hits):
    """Store and find texts, and see that what is found is right."""
    try:
        torch.set_num_threads(1)
        draw = random.Random(seed)
        end = time.time() + seconds
        while time.time() < end:
            tokens = text(draw)
            store = PrefixStore(backend=backend, block=8)
            length = found_in(store, tokens)
            hits.value += length > 0
            if length < len(tokens):
                store.insert("m", torch.tensor(tokens), fed(tokens))
            elif draw.random() < 0.1:
                backend.delete(blocks_of(tokens)[0].key)
        assert backend.failures == 0, backend.last_error
    except BaseException as error:
        failures.put(f"{seed}: {error!r}")
        raise


@pytest.mark.slow
def test_killed_processes(client):
    """Forks of one that has a connection already, which put and delete the same texts."""
    backend = client(timeout=10)
    put(backend, TEXT)
    context = multiprocessing.get_context("fork")
    failures, hits = context.Queue(), context.Value("q", 0, lock=False)

    def start(seed, seconds):
        args = (backend, seed, seconds, failures, hits)
        process = context.Process(target=_work, args=args, daemon=True)
        process.start()
        return process

    draw = random.Random(5)
    alive = [start(seed, 60) for seed in range(4)]
    for seed in range(5):
        time.sleep(draw.random() / 4)
        victim = alive.pop(draw.randrange(4))
        os.kill(victim.pid, signal.SIGKILL)
        victim.join()
        alive.append(start(10 + seed, 60))
    for process in alive:
        process.kill()
        process.join()
    last = [start(seed, 0.5) for seed in range(20, 23)]
    for process in last:
        process.join()
    assert failures.empty(), failures.get()
    assert hits.value > 100
    fresh = client()
    assert found(fresh, TEXT) == 40
    keys = list(fresh.scan())
    assert len(keys) == len(set(keys)) > 5
    for seed in range(12):
        tokens = text(random.Random(seed))
        assert put(fresh, tokens) == len(tokens)
        found(fresh, tokens)  # what is listed but deleted is put again
        assert put(fresh, tokens) == found(fresh, tokens) == len(tokens)
    assert fresh.failures == 0


def _in_child(backend, results):
    results.put((found(backend, TEXT), put(backend, [8] * 8), backend.failures))


def test_a_fork_has_its_own_connection(client):
    backend = client()
    put(backend, TEXT)
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    children = [context.Process(target=_in_child, args=(backend, results)) for _ in range(3)]
    with backend._lists.lock():  # no thread of the child will release it
        for child in children:
            child.start()
    for _ in range(20):
        assert found(backend, TEXT) == 40
    for child in children:
        assert results.get(timeout=60) == (40, 8, 0)
        child.join()
    assert backend.failures == 0


def test_a_dead_server(short_rest):
    """One failure, not one for each block; and the text that is generated is the same."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        backend = LMCache(f"lm://127.0.0.1:{unused.getsockname()[1]}")
    assert found(backend, TEXT) == 0
    assert put(backend, TEXT) == 40
    assert backend.labels(["a/b/c"]) == [None]
    assert (list(backend.scan()), backend.nbytes, backend.gc(budget=1)) == ([], 0, 0)
    assert not backend.contains("a/b/c")
    backend.delete("a/b/c")
    assert backend.failures == 1
    assert "ConnectionRefusedError" in backend.last_error
    assert eventually(lambda: not backend.resting)
    assert not backend.exists()
    assert backend.failures == 2

    model, prompt = tiny("llama"), torch.arange(2, 30)[None]
    with kvkeep.attach(model, store=PrefixStore(backend=backend, block=8)):
        given = model.generate(prompt, max_new_tokens=4, do_sample=False)
    assert given.equal(model.generate(prompt, max_new_tokens=4, do_sample=False))


@pytest.mark.parametrize(
    ("bytes_that_pass", "cut"),
    [
        *((30, True), (36, True), (6000, True), (6000, False)),
        pytest.param(30, False, marks=pytest.mark.slow),
    ],
)
def test_a_server_that_dies_in_the_middle(server, client, short_rest, cut, bytes_that_pass):
    put(client(), TEXT)
    between = Between(server.port, cut)
    try:
        backend = client(between.url.replace("redis", "lm"), timeout=0.3)
        assert found(backend, TEXT) == 40
        between.limit["down"] = bytes_that_pass
        assert found(backend, TEXT) < 40
        hollow = cut and bytes_that_pass == 36  # as if the server had nothing to send
        assert backend.damaged == hollow
        assert backend.failures == 1
        between.limit["down"] = None
        assert eventually(lambda: put(backend, TEXT) and found(backend, TEXT) == 40)

        other = [100 + token for token in TEXT]
        between.limit["up"] = bytes_that_pass
        failures = backend.failures
        assert put(backend, other) == 40
        assert backend.failures == failures + 1
        between.limit["up"] = None
        assert found(client(), other) in range(0, 41, 8)
        assert eventually(lambda: put(backend, other) and found(backend, other) == 40)
    finally:
        between.close()


def test_a_server_that_starts_again(short_rest):
    server = Fake()
    backend = LMCache(server.url)
    put(backend, TEXT)
    server.kill()
    assert found(backend, TEXT) == 0
    server.start()
    assert eventually(lambda: put(backend, TEXT) and found(backend, TEXT) == 40)
    failures = backend.failures
    server.kill()
    server.start()
    assert put(backend, TEXT) == 40  # an idle connection that is closed is no failure
    assert found(backend, TEXT) == 40
    assert backend.failures == failures
    server.kill()


@pytest.mark.slow
def test_lmcaches_server_is_stopped_and_killed(python, short_rest):
    server = Real(python)
    try:
        backend = LMCache(server.url, timeout=0.5)
        put(backend, TEXT)
        server.send(signal.SIGSTOP)
        assert found(backend, TEXT) == 0
        assert backend.failures == 1
        assert "imeout" in backend.last_error
        server.send(signal.SIGCONT)
        assert eventually(lambda: found(backend, TEXT) == 40)
        server.kill()
        assert found(backend, TEXT) == 0
        server.start()
        assert eventually(lambda: put(backend, TEXT) and found(backend, TEXT) == 40)
    finally:
        server.kill()


ANSWERS = [
    (b"HTTP/1.1 400 Bad Request\r\n\r\n" + bytes(20), "does not follow LMCache"),
    (struct.pack("<9i", 200, -1, 5, 6, -1, 0, 0, 0, 0), "does not follow LMCache"),
    (struct.pack("<9i", 200, 9, 5, 6, 8, 0, 0, 0, 0) + b"123456789", "does not follow LMCache"),
    (struct.pack("<9i", 200, 9, 4, 6, 9, 0, 0, 0, 0) + b"123456789", "does not follow LMCache"),
    (struct.pack("<9i", 500, 9, 5, 6, 9, 0, 0, 0, 0) + b"123456789", "does not follow LMCache"),
    (struct.pack("<9i", 400, 9, 1, 2, 0, 0, 0, 0, 0) + b"123456789", "does not follow LMCache"),
    (bytes(36), "does not follow LMCache"),
    (struct.pack("<2i", 200, 9), "disconnected after 8 bytes"),
    (
        struct.pack("<9i", 200, 2**31 - 1, 5, 6, 2**31 - 1, 0, 0, 0, 0) + b"x",
        "disconnected after 1 of",
    ),
    (b"", "disconnected after 0 bytes"),
]


@pytest.mark.parametrize(("answer", "message"), ANSWERS)
def test_a_server_of_something_else(answer, message):
    listening = socket.create_server(("127.0.0.1", 0))

    def serve():
        while True:
            try:
                client, _ = listening.accept()
                read(client, 186)
                client.sendall(answer)
                client.close()
            except OSError:
                return

    threading.Thread(target=serve, daemon=True).start()
    backend = LMCache(f"lm://127.0.0.1:{listening.getsockname()[1]}")
    assert backend.get("a/b/c") is None
    assert message in backend.last_error
    assert backend.resting
    assert put(backend, TEXT) == 40
    assert found(backend, TEXT) == 0
    assert (backend.failures, backend.damaged) == (1, 0)
    listening.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"url": "http://localhost:1"}, "1' is not valid for LMCache; give lm://host:port"),
        ({"url": "lm://localhost"}, "lm://host:port"),
        ({"url": "lm://localhost:0"}, "lm://host:port"),
        ({"url": "lm://localhost:65536"}, "lm://host:port"),
        ({"url": "lm://localhost:1/path"}, "lm://host:port"),
        ({"url": "lm://localhost:1?colour=red"}, "lm://host:port"),
        ({"url": "lm://me:secret@localhost:1"}, "URL 'localhost:1' is"),
        ({"timeout": 0}, "timeout of 0 seconds"),
        ({"timeout": float("inf")}, "timeout of inf"),
        ({"name": ""}, "name ''"),
        ({"name": "a@b"}, "name 'a@b'"),
        ({"name": "a" * 101}, "1 to 100"),
    ],
)
def test_bad_input(options, message):
    with pytest.raises(SpecError, match=message):
        LMCache(**{"url": "lm://localhost:1"} | options)
