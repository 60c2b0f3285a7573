"""LMCache: blocks in the standalone server of LMCache, for many machines."""

from __future__ import annotations

import hashlib
import os
import re
import socket
import struct
import time
from collections.abc import Iterable, Iterator, Sequence
from math import inf
from threading import Lock, local
from typing import ClassVar, NamedTuple, final

import xxhash

from kvkeep.errors import SpecError
from kvkeep.store.backend import ABANDONED_S, Block, Label, beginning, require_budget
from kvkeep.store.remote import Remote

SCHEME = "lm"
"""How URLs of such servers begin, here as in LMCache."""

_URL = re.compile(SCHEME + r"://([A-Za-z0-9_.-]+):([1-9]\d{0,4})/?\??")

# A request is what to do, the bytes that follow, their format and dtype, where to, a shape, and a
# key; an answer is a code, the bytes that follow, their format, dtype and shape, and where from.
_REQUEST = struct.Struct("<9i150s")
_ANSWER = struct.Struct("<iI7i")
_PUT, _GET, _EXIST = 1, 2, 3
_FOUND, _ABSENT = 200, 400
_BYTES, _UINT8 = 5, 6
_MOST = 2**31 - 1  # bytes of a value, a signed number there
_PART = 2**20  # bytes received at once

_LISTS = 1024  # of keys; each put and each question reads one
_ALIKE = 16  # lists of keys that begin alike, so that few who write at once meet in one
_LISTED = re.compile(r"^([0-9a-z/-]+) (\d{1,15}) (\d{1,15})$", re.MULTILINE)
_BEGINNING = len(beginning("", "0" * 64, 0))  # characters of such a beginning
_TRIES = 4  # to change a list, while others do
_QUICKACK = getattr(socket, "TCP_QUICKACK", None)

Answer = bytes | bool | None
"""A value, or whether there is one; None where nobody answers."""


class _Entry(NamedTuple):
    nbytes: int
    written: int  # milliseconds since 1970


class _HollowError(ConnectionError):
    """The server has a value of which it can send nothing."""


@final
class LMCache(Remote):
    """The standalone server of LMCache (`python -m lmcache.v1.server`), spoken to by its own
    protocol; its package is not needed here. Proven with LMCache 0.5.6.

    That server keeps values under names, and can neither list, remove nor evict them. So lists of
    keys are kept as values too, and what is deleted is overwritten with nothing. Of two processes
    that change a list at once one may lose an entry: then a block is missing until it is put again.
    The server's memory has no end: call `gc` with a budget. It knows no passwords either; whoever
    reaches it may read and write.

    A server that does not answer is a miss, and is left alone for some seconds.

    Args:
        url: `lm://host:port`.
        timeout: seconds to wait for a connection, for an answer that does not come or does not go
            on, and for a block to be sent.
        name: the model that the server is told of; stores of other names know nothing of each
            other.

    Raises:
        SpecError: any of these cannot be. Whether the server is there is not asked.
    """

    name: ClassVar[str] = "lmcache"

    def __init__(self, url: str, timeout: float = 2.0, name: str = "kvkeep") -> None:
        super().__init__()
        found = _URL.fullmatch(url)
        if found is None or int(found[2]) > 65535:
            raise SpecError(f"URL {url.rpartition('@')[2]!r} of LMCache; give lm://host:port")
        if not 0 < timeout < inf:
            raise SpecError(f"a timeout of {timeout} seconds; give more than 0, such as 2")
        if not re.fullmatch(r"[A-Za-z0-9_.-]{1,100}", name):
            raise SpecError(f"name {name!r}; give at most 100 letters, digits and any of _.-")
        self._address = found[1], int(found[2])
        self._timeout = timeout
        self._model = name
        self._local = local()
        self._lock = (os.getpid(), Lock())

    def get(self, key: str, *, used: bool = True) -> Block | None:
        data = self._call(_GET, f"block {key}")
        if not isinstance(data, bytes):
            return None
        if not data:  # it was deleted while others listed it
            self.delete(key)
            return None
        return self._checked(key, data)

    def put(self, block: Block) -> bool:
        return self.put_all([block]) == 1

    def put_all(self, blocks: Iterable[Block]) -> int:
        now = int(time.time() * 1000)  # the end of a text counts as older, for it goes first
        return sum(self._put(block, now - after) for after, block in enumerate(blocks))

    def contains(self, key: str) -> bool:
        return key in (self._listed(_list_of(key)) or {})

    def delete(self, key: str) -> None:
        self._removed(key)

    def scan(self, prefix: str = "") -> Iterator[str]:
        known = len(prefix) >= _BEGINNING
        found = self._entries(_lists_of(prefix[:_BEGINNING]) if known else range(_LISTS))
        keys = sorted(found, key=lambda key: -found[key].written)  # the last are often the next
        return iter([key for key in keys if key.startswith(prefix)])

    def missing(self, keys: Sequence[str]) -> list[str]:
        lists = ((key, self._listed(_list_of(key))) for key in keys)
        return [key for key, listed in lists if listed is not None and key not in listed]

    def labels(self, keys: Sequence[str]) -> list[Label | None]:
        starts = ((key, self._call(_GET, f"label {key}")) for key in keys)
        return [
            self._label(key, data or None if isinstance(data, bytes) else None)
            for key, data in starts
        ]

    def gc(self, older_than: float = ABANDONED_S, budget: int | None = None) -> int:
        """Remove blocks, the oldest first, until the rest fits a budget; there is nothing else to
        remove. The bytes of all that."""
        require_budget(budget)
        entries = self._entries(range(_LISTS))
        over = 0 if budget is None else sum(entry.nbytes for entry in entries.values()) - budget
        freed = 0
        for key, entry in sorted(entries.items(), key=lambda item: item[1].written):
            if freed >= over:
                break
            freed += self._removed(key) * entry.nbytes
        return freed

    def exists(self) -> bool:
        return any(self._call(_EXIST, f"list {number}") is True for number in range(_LISTS))

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
        return sum(entry.nbytes for entry in self._entries(range(_LISTS)).values())

    def _put(self, block: Block, written: int) -> bool:
        key = block.key
        listed = self._listed(_list_of(key))
        if listed is None or key in listed:
            return listed is not None
        data = block.to_bytes()
        if len(data) > _MOST:
            return False
        start = data[: 8 + int.from_bytes(data[:8], "little") + block.tokens.nbytes]
        puts = [(f"label {key}", start), (f"block {key}", data)]
        if self._call(_EXIST, f"block {key}", puts) is not True:  # no put is ever answered
            return False
        return self._enlist(key, _Entry(len(data), written))

    def _removed(self, key: str) -> bool:
        if self._call(_EXIST, f"block {key}") is not True:
            return False
        return self._enlist(key, None, [(f"block {key}", b""), (f"label {key}", b"")])

    def _entries(self, numbers: Iterable[int]) -> dict[str, _Entry]:
        return {key: e for n in numbers for key, e in (self._listed(n) or {}).items()}

    def _listed(
        self, number: int, puts: Sequence[tuple[str, bytes]] = ()
    ) -> dict[str, _Entry] | None:
        """The keys in a list; None where nobody answers."""
        data = self._call(_GET, f"list {number}", puts)
        if data is None:
            return None
        lines = _LISTED.findall(data.decode("ascii", "replace")) if isinstance(data, bytes) else []
        return {key: _Entry(int(nbytes), int(written)) for key, nbytes, written in lines}

    def _enlist(
        self, key: str, entry: _Entry | None, puts: Sequence[tuple[str, bytes]] = ()
    ) -> bool:
        """See that a key is listed, or is not, after something was put."""
        number = _list_of(key)
        with self._guard():
            for _ in range(_TRIES):  # others may write what they read before
                listed = self._listed(number, puts)
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

    def _call(self, command: int, what: str, puts: Iterable[tuple[str, bytes]] = ()) -> Answer:
        """Put values, and then ask for one."""
        return self._asked(lambda: self._journey(command, what, puts), None)

    def _journey(self, command: int, what: str, puts: Iterable[tuple[str, bytes]]) -> Answer:
        connection = self._connected()
        try:
            for name, data in puts:
                connection.put(self._named(name), data)
            return connection.ask(command, self._named(what))
        except _HollowError:  # its writer died on the way, and the server hangs up on all readers
            connection.close()
            self.damaged += 1
            return b""
        except BaseException:
            connection.close()
            raise

    def _named(self, what: str) -> bytes:
        """A key of LMCache: model, ranks, hash and dtype."""
        own = hashlib.sha256(what.encode(errors="replace")).hexdigest()[
            :32
        ]  # there is no more room
        return f"{self._model}@1@0@{own}@uint8".encode()

    def _connected(self) -> _Connection:
        """The connection of this thread, and of this process if it is a fork."""
        pid, held = getattr(self._local, "held", (0, None))
        if held is not None and (pid != os.getpid() or not held.is_idle()):
            held.close()
            held = None
        if held is None:
            held = _Connection(self._address, self._timeout)
            self._local.held = (os.getpid(), held)
        return held

    def _guard(self) -> Lock:
        """For threads of this process; in a fork nobody may be left to release another."""
        if self._lock[0] != os.getpid():
            self._lock = (os.getpid(), Lock())
        return self._lock[1]


class _Connection:
    """A connection to the server, for one thread at a time."""

    def __init__(self, address: tuple[str, int], timeout: float) -> None:
        self._timeout = timeout
        self._socket = socket.create_connection(address, timeout)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.close = self._socket.close

    def put(self, name: bytes, data: bytes) -> None:
        """Send a value, of which nobody tells whether it came."""
        length = len(data)
        request = _REQUEST.pack(_PUT, length, _BYTES, _UINT8, 0, length, 0, 0, 0, name.ljust(150))
        self._socket.sendall(request)
        self._socket.sendall(data)

    def ask(self, command: int, name: bytes) -> Answer:
        """A value, or whether there is one.

        Raises:
            OSError: no answer came, or half of it.
            ValueError: it is none of LMCache's.
        """
        self._socket.sendall(_REQUEST.pack(command, 0, _BYTES, _UINT8, *[0] * 5, name.ljust(150)))
        head = self._received(_ANSWER.size)
        if len(head) < _ANSWER.size:
            raise ConnectionError(f"the server hung up after {len(head)} bytes of an answer")
        code, length, *kind = _ANSWER.unpack(head)
        if code == _ABSENT and not length:
            return False
        if code == _FOUND and not length and command == _EXIST:
            return True
        if code != _FOUND or command != _GET or kind != [_BYTES, _UINT8, length, 0, 0, 0, 0]:
            raise ValueError(f"no answer of LMCache's server: {head.hex()}")
        data = self._received(length)
        if length and not data:
            raise _HollowError("the server hung up before a value")
        if len(data) < length:
            raise ConnectionError(f"the server hung up after {len(data)} of {length} bytes")
        return data

    def is_idle(self) -> bool:
        """Whether it is open, and nothing comes that nobody asked for."""
        try:
            self._socket.settimeout(0)
            self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            self._socket.settimeout(self._timeout)
            return True
        except OSError:
            pass
        return False

    def _received(self, length: int) -> bytes:
        """So many bytes, or fewer if the server hung up."""
        parts, left = list[bytes](), length
        while left:
            # The server sends the end of a value only when what it sent before is acknowledged,
            # for which many systems wait 40 ms.
            if _QUICKACK is not None:
                self._socket.setsockopt(socket.IPPROTO_TCP, _QUICKACK, 1)
            part = self._socket.recv(min(left, _PART))
            if not part:
                break
            parts.append(part)
            left -= len(part)
        return b"".join(parts)


def _lists_of(start: str) -> list[int]:
    """The lists of all keys with some beginning."""
    first = _hash(start)
    return [(first + number) % _LISTS for number in range(_ALIKE)]


def _list_of(key: str) -> int:
    """The list in which a key is."""
    return _lists_of(key[:_BEGINNING])[_hash(key) % _ALIKE]


def _hash(text: str) -> int:
    return xxhash.xxh3_64_intdigest(text.encode(errors="replace"))
