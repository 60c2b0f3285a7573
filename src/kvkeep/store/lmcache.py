"""LMCache: blocks in LMCache's standalone server, which machines can share."""

from __future__ import annotations

import hashlib
import os
import re
import socket
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from threading import Lock, local
from typing import Any, ClassVar, NamedTuple, final

import xxhash

from kvkeep.errors import SpecError
from kvkeep.store.backend import ABANDONED_S, Remote, require_budget, require_seconds
from kvkeep.store.block import StoredBlock, beginning

_URL = re.compile(r"lm://([A-Za-z0-9_.-]+):([1-9]\d{0,4})/?")

# A request holds the command, the number of bytes that follow, their format and dtype, the
# location, a shape and a key. An answer holds a code, the number of bytes that follow, their
# format, dtype and shape, and the location.
_REQUEST = struct.Struct("<9i150s")
_ANSWER = struct.Struct("<iI7i")
_PUT, _GET, _EXIST = 1, 2, 3
_FOUND, _ABSENT = 200, 400
_BYTES, _UINT8 = 5, 6
_MOST = 2**31 - 1  # bytes of a value; the protocol's length is a signed 32-bit number
_PART = 2**20  # bytes received at once

_LISTS = 1024  # lists of keys; each put and each lookup reads one
_ALIKE = 16  # lists for keys of one beginning, so that two clients rarely change the same list
_LISTED = re.compile(r"^([0-9a-z/-]+) (\d{1,15}) (\d{1,15})$", re.MULTILINE)
_BEGINNING = len(beginning("", "0" * 64, 0))  # characters of a key's beginning
_TRIES = 4  # attempts to change a list that other clients change at the same time
_QUICKACK = getattr(socket, "TCP_QUICKACK", None)

Answer = bytes | bool | None
"""A value, or whether it exists; None if the server did not answer."""


class _Entry(NamedTuple):
    nbytes: int
    written: int  # milliseconds since 1970


class _NoValueError(ConnectionError):
    """The server lists a value but closes the connection before sending any of it."""


@final
class LMCache(Remote):
    """A client of LMCache's standalone server (`python -m lmcache.v1.server`) that speaks its
    protocol without LMCache's package. Tested with LMCache 0.5.6.

    The server stores named values and cannot list, remove or evict them. So this class stores lists
    of keys as values, and deletes a block by overwriting it with an empty value. If two processes
    change a list at the same time, an entry may be lost; its block is missing until it is put
    again. The server does not limit its memory: call `gc` with a budget. It has no passwords: any
    client that can connect may read and write.

    After a failure, calls return a miss for five seconds.

    Args:
        url: `lm://host:port`.
        timeout: seconds to wait for a connection, for each part of an answer, and for each send.
        name: the model name in the server's keys; stores with different names are separate.
        budget: None; the server has no limit.

    Raises:
        SpecError: an argument is invalid. The server is not contacted here.
    """

    name: ClassVar[str] = "lmcache"
    schemes = ("lm",)

    def __init__(
        self, url: str, timeout: float = 2.0, name: str = "kvkeep", *, budget: int | None = None
    ) -> None:
        found = _URL.fullmatch(url)
        if found is None or int(found[2]) > 65535:
            raise SpecError(
                f"URL {url.rpartition('@')[2]!r} is not valid for LMCache; give lm://host:port"
            )
        require_seconds("timeout", timeout, 2)
        if not re.fullmatch(r"[A-Za-z0-9_.-]{1,100}", name):
            raise SpecError(
                f"name {name!r} is not valid; give 1 to 100 letters, digits or any of _.-"
            )
        if budget is not None:
            raise SpecError(
                f"a budget of {budget} bytes, but LMCache's server enforces none; call "
                "gc(budget=...) instead"
            )
        self._client = _Client((found[1], int(found[2])), timeout, name)
        self._lists = _Lists(self._call)

    def _data(self, keys: Sequence[str], most: int | None = None) -> list[Any]:
        return [self._one(key, "block" if most is None else "label") for key in keys]

    def _one(self, key: str, kind: str) -> Answer:
        data = self._call(_GET, f"{kind} {key}")
        if data == b"" and kind == "block":  # deleted, but another client has listed it again
            self.delete(key)
        return data or None

    def _exist(self, keys: Sequence[str]) -> list[bool | None]:
        lists = ((key, self._lists.read(_list_of(key))) for key in keys)
        return [None if listed is None else key in listed for key, listed in lists]

    def put_all(self, blocks: Iterable[StoredBlock]) -> int:
        now = int(time.time() * 1000)  # later blocks get older times, to be removed first
        return sum(self._put(block, now - after) for after, block in enumerate(blocks))

    def _put(self, block: StoredBlock, written: int) -> bool:
        key = block.key
        [exists] = self._exist([key])
        if exists is not False:
            return exists is True
        data = block.to_bytes()
        if len(data) > _MOST:
            return False
        start = data[: 8 + int.from_bytes(data[:8], "little") + block.tokens.nbytes]
        puts = [(f"label {key}", start), (f"block {key}", data)]
        if self._call(_EXIST, f"block {key}", puts) is not True:  # puts get no answer
            return False
        return self._lists.update(key, _Entry(len(data), written))

    def delete(self, key: str) -> None:
        self._remove(key)

    def _remove(self, key: str) -> bool:
        if self._call(_EXIST, f"block {key}") is not True:
            return False
        return self._lists.update(key, None, [(f"block {key}", b""), (f"label {key}", b"")])

    def scan(self, prefix: str = "") -> Iterator[str]:
        known = len(prefix) >= _BEGINNING
        found = self._lists.entries(_lists_of(prefix[:_BEGINNING]) if known else range(_LISTS))
        keys = sorted(found, key=lambda key: -found[key].written)  # newest first
        return iter([key for key in keys if key.startswith(prefix)])

    def gc(self, older_than: float = ABANDONED_S, budget: int | None = None) -> int:
        """Remove blocks, oldest first, until the rest fits `budget` bytes. Returns the bytes freed.
        `older_than` has no effect, since the server keeps no abandoned or quarantined data."""
        require_budget(budget)
        entries = self._lists.entries(range(_LISTS))
        over = 0 if budget is None else sum(entry.nbytes for entry in entries.values()) - budget
        freed = 0
        for key, entry in sorted(entries.items(), key=lambda item: item[1].written):
            if freed >= over:
                break
            freed += self._remove(key) * entry.nbytes
        return freed

    def exists(self) -> bool:
        return any(self._call(_EXIST, f"list {number}") is True for number in range(_LISTS))

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
        return sum(entry.nbytes for entry in self._lists.entries(range(_LISTS)).values())

    def _call(self, command: int, what: str, puts: Iterable[tuple[str, bytes]] = ()) -> Answer:
        """Send `puts`, then one command; None if the server did not answer."""

        def call() -> Answer:
            try:
                return self._client.call(command, what, puts)
            except _NoValueError:  # a writer died halfway; the server disconnects every reader
                self.damaged += 1
                return b""

        return self._asked(call, None)


class _Lists:
    """The lists of keys in a server, which are changed by one thread of this process at a time.

    Args:
        call: see `LMCache._call`.
    """

    def __init__(self, call: Callable[..., Answer]) -> None:
        self._call, self._lock = call, (os.getpid(), Lock())

    def entries(self, numbers: Iterable[int]) -> dict[str, _Entry]:
        """The keys in some lists."""
        return {key: e for n in numbers for key, e in (self.read(n) or {}).items()}

    def read(self, number: int, puts: Iterable[tuple[str, bytes]] = ()) -> dict[str, _Entry] | None:
        """Send `puts`, then read the keys in a list; None if the server did not answer."""
        data = self._call(_GET, f"list {number}", puts)
        if data is None:
            return None
        lines = _LISTED.findall(data.decode("ascii", "replace")) if isinstance(data, bytes) else []
        return {key: _Entry(int(nbytes), int(written)) for key, nbytes, written in lines}

    def update(
        self, key: str, entry: _Entry | None, puts: Iterable[tuple[str, bytes]] = ()
    ) -> bool:
        """Send `puts`, then add a key to its list, or remove it if `entry` is None."""
        number = _list_of(key)
        with self.lock():
            for _ in range(_TRIES):  # another client may overwrite the list with an older state
                listed = self.read(number, puts)
                if listed is None:
                    return False
                if (key in listed) == (entry is not None):
                    return True
                listed.pop(key, None)
                if entry is not None:
                    listed[key] = entry
                lines = (f"{name} {e.nbytes} {e.written}\n" for name, e in listed.items())
                puts = [(f"list {number}", "".join(lines).encode())]
        return False

    def lock(self) -> Lock:
        """The lock for this process's threads. A forked process gets a new one, because the thread
        that would release the inherited lock does not exist in it."""
        if self._lock[0] != os.getpid():
            self._lock = (os.getpid(), Lock())
        return self._lock[1]


class _Client(local):
    """A connection to the server, for each thread and each forked process that uses the client.

    Args:
        address: host and port.
        timeout: see `LMCache`.
        model: the model name in the server's keys.
    """

    def __init__(self, address: tuple[str, int], timeout: float, model: str) -> None:
        self.address, self.model, self._timeout = address, model, timeout
        self._socket, self._pid = socket.socket(), 0  # replaced when it is first used
        self._socket.close()

    def call(self, command: int, what: str, puts: Iterable[tuple[str, bytes]]) -> Answer:
        """Send `puts`, which the server does not acknowledge, then a command. Returns the value, or
        whether it exists.

        Raises:
            OSError: the answer is missing or incomplete.
            ValueError: the answer does not follow LMCache's protocol.
        """
        if self._pid != os.getpid() or not self._is_idle():
            self._socket.close()
            self._socket = socket.create_connection(self.address, self._timeout)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._pid = os.getpid()
        try:
            for name, data in puts:
                self._send(_PUT, name, data)
            self._send(command, what)
            return self._answer(command)
        except BaseException:
            self._socket.close()
            raise

    def _send(self, command: int, what: str, data: bytes = b"") -> None:
        # The field for LMCache's form of a key (model, ranks, hash and dtype) has no room for the
        # whole hash.
        own = hashlib.sha256(what.encode(errors="replace")).hexdigest()[:32]
        name = f"{self.model}@1@0@{own}@uint8".encode().ljust(150)
        kind, length = (_BYTES, _UINT8), len(data)
        self._socket.sendall(_REQUEST.pack(command, length, *kind, 0, length, 0, 0, 0, name))
        self._socket.sendall(data)

    def _answer(self, command: int) -> Answer:
        head = self._receive(_ANSWER.size)
        if len(head) < _ANSWER.size:
            raise ConnectionError(f"the server disconnected after {len(head)} bytes of an answer")
        code, length, *kind = _ANSWER.unpack(head)
        if code == _ABSENT and not length:
            return False
        if code == _FOUND and not length and command == _EXIST:
            return True
        if code != _FOUND or command != _GET or kind != [_BYTES, _UINT8, length, 0, 0, 0, 0]:
            raise ValueError(f"the answer does not follow LMCache's protocol: {head.hex()}")
        data = self._receive(length)
        if length and not data:
            raise _NoValueError("the server disconnected before sending the value")
        if len(data) < length:
            raise ConnectionError(f"the server disconnected after {len(data)} of {length} bytes")
        return data

    def _is_idle(self) -> bool:
        """Whether the connection is open and has no unexpected data waiting."""
        try:
            self._socket.settimeout(0)
            self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            self._socket.settimeout(self._timeout)
            return True
        except OSError:
            pass
        return False

    def _receive(self, length: int) -> bytes:
        """Receive `length` bytes, or fewer if the server disconnects."""
        parts, left = list[bytes](), length
        while left:
            # The server sends the end of a value only after its earlier packets are acknowledged,
            # which many systems delay by 40 ms.
            if _QUICKACK is not None:
                self._socket.setsockopt(socket.IPPROTO_TCP, _QUICKACK, 1)
            part = self._socket.recv(min(left, _PART))
            if not part:
                break
            parts.append(part)
            left -= len(part)
        return b"".join(parts)


def _lists_of(start: str) -> list[int]:
    """The numbers of the lists that may hold keys with a given start."""
    first = _hash(start)
    return [(first + number) % _LISTS for number in range(_ALIKE)]


def _list_of(key: str) -> int:
    """The number of the list that holds a key."""
    return _lists_of(key[:_BEGINNING])[_hash(key) % _ALIKE]


def _hash(text: str) -> int:
    return xxhash.xxh3_64_intdigest(text.encode(errors="replace"))
