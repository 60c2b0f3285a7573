"""Redis: blocks in a Redis or Valkey server, which several machines can share."""

from __future__ import annotations

import hashlib
import re
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from importlib import import_module
from itertools import takewhile
from math import inf
from typing import Any, ClassVar, TypeGuard, final

from kvkeep.errors import SpecError
from kvkeep.extras import needed_by
from kvkeep.store.backend import (
    ABANDONED_S,
    LABEL_BYTES,
    Label,
    StoredBlock,
    is_key,
    most_bytes,
    require_budget,
)
from kvkeep.store.clock import Clock, punctual
from kvkeep.store.redis_scripts import DELETE, FIT, PAGE, PUT, SET_ASIDE, TOUCH
from kvkeep.store.remote import Remote

SCHEMES = {
    "redis": "redis",
    "rediss": "rediss",
    "unix": "unix",
    "valkey": "redis",
    "valkeys": "rediss",
}
"""URL scheme -> the scheme that the client library knows for such a server."""

_SHA = {
    script: hashlib.sha1(script.encode(), usedforsecurity=False).hexdigest()
    for script in (PUT, TOUCH, DELETE, SET_ASIDE, PAGE, FIT)
}
_MOST = 512 * 2**20  # bytes of a value
_BATCH_BYTES = 32 * 2**20  # sent or requested in one round trip
_PAGE = 256  # keys of a scan in one round trip
_LABELS = 16  # labels in one round trip
_MOST_PAGES = 1 << 16  # of a listing, so that a faulty server cannot keep a client listing forever
_QUARANTINE_MS = 24 * 3600 * 1000  # how long a damaged block is kept

Command = tuple[Any, ...]


@final
class Redis(Remote):
    """A Redis (5 or newer) or Valkey server; clusters are not supported. The blocks of a prompt are
    requested in batches.

    Atomic scripts on the server enforce the budget and remove the accounts of expired blocks, so a
    client may be killed at any time. A damaged block is kept in quarantine, under another key, for
    a day. After a failure, calls return a miss for five seconds.

    Args:
        url: `redis://[user:password@]host[:port][/database]`, `rediss://` over TLS,
            `unix:///path`; `valkey://` is the same as `redis://`.
        budget: most bytes of all blocks; the least recently used are removed first. It is enforced
            when this client puts blocks. None: no limit but the server's `maxmemory`.
        ttl: seconds after its last use by this client until a block expires. None: never.
        timeout: seconds to wait for a connection, for each part of an answer, and for each send.
        deadline: seconds for a whole call; blocks that have not arrived by then are misses. A
            listing of the whole server (`scan`, `gc`) has this time for each page and reads at most
            65536 pages.
        name: prefix of all keys, before a colon; stores with different names are separate.

    Raises:
        SpecError: an argument is invalid. The server is not contacted here.
        MissingPackageError: the client library is not installed.
    """

    name: ClassVar[str] = "redis"

    def __init__(
        self,
        url: str,
        budget: int | None = None,
        ttl: float | None = None,
        timeout: float = 2.0,
        name: str = "kvkeep",
        deadline: float = 10.0,
    ) -> None:
        super().__init__()
        scheme, _, rest = url.partition("://")
        if scheme not in SCHEMES:
            raise SpecError(
                f"URL scheme {scheme[:20]!r} is not valid for Redis; give one of {list(SCHEMES)}"
            )
        require_budget(budget)
        if ttl is not None and not 1 <= ttl < inf:
            raise SpecError(f"a ttl of {ttl} seconds; give at least 1, or None")
        if not 0 < timeout < inf:
            raise SpecError(f"a timeout of {timeout} seconds; give more than 0, such as 2")
        if not 0 < deadline < inf:
            raise SpecError(f"a deadline of {deadline} seconds; give more than 0, such as 10")
        if not re.fullmatch(r"[\w.:{}-]+", name):
            raise SpecError(f"name {name!r} is not valid; give letters, digits or any of _.:-{{}}")
        self.budget = budget
        self.ttl = ttl
        self._clock, self._deadline = Clock(), deadline
        address = f"{SCHEMES[scheme]}://{rest}"
        self._client, self._errors = _client(address, timeout, self._clock)
        self._base, self._quarantined = f"{name}:block:", f"{name}:quarantine:"
        self._accounts = (f"{name}:used", f"{name}:index", f"{name}:sizes")
        self._life = "" if ttl is None else int(ttl * 1000)

    def get(self, key: str, *, used: bool = True) -> StoredBlock | None:
        with self._clock.running(self._deadline):
            if not self._fits(self._sizes([key])[0]):
                return None
            return self._get_blocks([key], used)[0]

    def put(self, block: StoredBlock) -> bool:
        with self._clock.running(self._deadline):
            return self.contains(block.key) or self.put_all([block]) == 1

    def contains(self, key: str) -> bool:
        return bool(self._sizes([key])[0])

    def delete(self, key: str) -> None:
        self._send([self._script(DELETE, key)])

    def quarantine(self, key: str) -> None:
        self.damaged += 1
        name = self._quarantined + uuid.uuid4().hex
        self._send([self._script(SET_ASIDE, key, name, _QUARANTINE_MS)])

    def scan(self, prefix: str = "") -> Iterator[str]:
        own = prefix.encode(errors="replace")
        start = b"[" + own if own else b"-"
        stop = b"(" + own + b"\xff" if own else b"+"
        before = b""
        for _ in range(_MOST_PAGES):
            [page] = self._send([self._script(PAGE, start, stop, _PAGE)]) or [None]
            if not isinstance(page, list) or not all(isinstance(key, bytes) for key in page):
                return
            last, *found = page or [b""]
            yield from filter(is_key, (key.decode(errors="replace") for key in found))
            if last <= before:  # no more pages, or a faulty server repeats one
                return
            start, before = b"(" + last, last

    def leading(self, keys: Sequence[str]) -> list[StoredBlock]:
        found: list[StoredBlock] = []
        with self._clock.running(self._deadline):
            for batch in _batches(keys, self._readable(keys)):
                for block in self._get_blocks(batch, used=True):
                    if block is None:
                        return found
                    found.append(block)
        return found

    def missing(self, keys: Sequence[str]) -> list[str]:
        return [key for key, size in zip(keys, self._sizes(keys), strict=True) if size == 0]

    def put_all(self, blocks: Iterable[StoredBlock]) -> int:
        with self._clock.running(self._deadline):
            return self._put_each(blocks)

    def _put_each(self, blocks: Iterable[StoredBlock]) -> int:
        done, waiting, size = 0, list[Command](), 0
        most = min(_MOST, self.budget or _MOST)
        for block in blocks:
            if self.resting:
                return done
            data = block.to_bytes()
            if len(data) > most:
                continue
            budget = "" if self.budget is None else self.budget
            waiting.append(self._script(PUT, block.key, data, budget, self._life))
            size += len(data)
            if size >= _BATCH_BYTES:
                done += self._put(waiting)
                waiting, size = [], 0
        return done + self._put(waiting)

    def as_one_call(self) -> AbstractContextManager[None]:
        return self._clock.running(self._deadline)

    def labels(self, keys: Sequence[str]) -> list[Label | None]:
        with self._clock.running(self._deadline):
            return self._labels(keys)

    def _labels(self, keys: Sequence[str]) -> list[Label | None]:
        found: list[Label | None] = []
        for start in range(0, len(keys), _LABELS):
            some = keys[start : start + _LABELS]
            asked = [("GETRANGE", self._base + key, 0, LABEL_BYTES - 1) for key in some]
            answers = self._send(asked) or [b""] * len(some)
            found += [
                self._label(key, data or None if isinstance(data, bytes) else None)
                for key, data in zip(some, answers, strict=True)
            ]
        return found

    def gc(self, older_than: float = ABANDONED_S, budget: int | None = None) -> int:
        require_budget(budget)
        base = self._base.encode()
        for names in self._scan_names(
            self._base
        ):  # the server may have dropped the accounts of some
            keys = [name[len(base) :] for name in names]
            self._send([self._script(TOUCH, self._life, 1, *keys)])
        freed = 0
        for names in self._scan_names(self._quarantined):
            for name in names:
                left, size = self._send([("PTTL", name), ("STRLEN", name)]) or (None, None)
                if type(left) is int and _QUARANTINE_MS - left >= older_than * 1000:
                    self._send([("UNLINK", name)])
                    freed += size if _is_count(size) else 0
        return freed + self._fit(budget, thorough=True)[0]

    def exists(self) -> bool:
        return self._send([("EXISTS", self._accounts[2])]) == [1]

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
        return self._fit(None, thorough=False)[1]

    def _sizes(self, keys: Sequence[str]) -> list[int | None]:
        """Sizes of blocks in bytes; 0 if there is no such block, None if unknown."""
        answers = self._send([("STRLEN", self._base + key) for key in keys])
        return [
            0 if _is_other_type(answer) else answer if _is_count(answer) else None
            for answer in answers or [None] * len(keys)
        ]

    def _readable(self, keys: Sequence[str]) -> list[int]:
        """Sizes of the leading blocks, up to the first that is missing or does not fit in
        memory."""
        sizes = takewhile(lambda size: size and self._fits(size), self._sizes(keys))
        return [size for size in sizes if size]

    def _fits(self, size: int | None) -> bool:
        """Whether a block of this size, as the server reports it, may be read."""
        most = min(_MOST, most_bytes())
        if size is not None and size > most:
            self._failed(MemoryError(f"a block of {size} bytes, but at most {most} may be read"))
            return False
        return True

    def _get_blocks(self, keys: Sequence[str], used: bool) -> list[StoredBlock | None]:
        asked: list[Command] = [("GET", self._base + key) for key in keys]
        if used:
            asked.append(self._script(TOUCH, self._life, 0, *keys))
        answers = self._send(asked)
        if answers is None:
            return [None] * len(keys)
        return [self._block(key, data) for key, data in zip(keys, answers, strict=False)]

    def _block(self, key: str, data: Any) -> StoredBlock | None:
        if data is None or (isinstance(data, Exception) and not _is_other_type(data)):
            return None
        return self._checked(key, data)

    def _put(self, commands: Sequence[Command]) -> int:
        return sum(answer == 1 for answer in (self._send(commands) or []))

    def _fit(self, budget: int | None, *, thorough: bool) -> tuple[int, int]:
        """Remove blocks until the rest fits a budget; returns the bytes freed and those left."""
        script = self._script(FIT, "" if budget is None else budget, int(thorough))
        [answer] = self._send([script]) or [None]
        if isinstance(answer, list) and len(answer) == 2 and all(map(_is_count, answer)):
            return answer[0], answer[1]
        return 0, 0

    def _scan_names(self, beginning: str) -> Iterator[list[bytes]]:
        """Yield, in batches, all names in the server that start with `beginning`; some may be
        repeated."""
        cursor: Any = 0
        for _ in range(_MOST_PAGES):
            pattern = ("MATCH", beginning + "*", "COUNT", 1000)
            [answer] = self._send([("SCAN", cursor, *pattern)]) or [None]
            if not isinstance(answer, (list, tuple)) or len(answer) != 2:
                return
            cursor, names = answer
            if not isinstance(names, list) or not all(isinstance(name, bytes) for name in names):
                return
            if names:
                yield names
            if not isinstance(cursor, int) or not cursor:
                return

    def _script(self, script: str, *arguments: Any) -> Command:
        return ("EVALSHA", _SHA[script], 3, *self._accounts, self._base, *arguments)

    def _send(self, commands: Sequence[Command]) -> list[Any] | None:
        """Send commands in one round trip and return their answers, or None if none came. The
        answer to a command that the server refused is an exception."""
        if not commands:
            return []
        answers = self._asked(lambda: self._round_trip(commands), None)
        for command, answer in zip(commands, answers or (), strict=False):
            known = _is_other_type(answer) and command[0] != "EVALSHA"
            if isinstance(answer, Exception) and not known:
                self._failed(answer)
        return answers

    def _round_trip(self, commands: Sequence[Command]) -> list[Any]:
        with self._clock.running(self._deadline):
            answers = self._pipeline(commands)
            if any(isinstance(answer, self._errors.NoScriptError) for answer in answers):
                # The server was restarted and has lost the scripts.
                self._pipeline([("SCRIPT LOAD", script) for script in _SHA])
                answers = self._pipeline(commands)
        if len(answers) != len(commands):
            raise ConnectionError(f"{len(answers)} answers to {len(commands)} commands")
        return answers

    def _pipeline(self, commands: Sequence[Command]) -> list[Any]:
        with self._client.pipeline(transaction=False) as pipe:
            for command in commands:
                pipe.execute_command(*command)
            answers: list[Any] = pipe.execute(raise_on_error=False)
        return answers


def _client(url: str, timeout: float, clock: Clock) -> tuple[Any, Any]:
    """The library's client and its exceptions module. The client is safe for threads and forks,
    observes the clock's deadline and never retries.

    Raises:
        MissingPackageError: the library is not installed.
        SpecError: the URL is invalid.
    """
    with needed_by("A store in Redis", "redis"):
        redis, retry = import_module("redis"), import_module("redis.retry")
        backoff = import_module("redis.backoff")
    try:
        client = redis.Redis.from_url(
            url,
            protocol=2,
            socket_timeout=timeout,
            socket_connect_timeout=timeout,
            retry=retry.Retry(backoff.NoBackoff(), 0),
        )
        pool = client.connection_pool
        pool.connection_class = punctual(pool.connection_class, clock)
        pool.connection_class(**pool.connection_kwargs)  # options it does not know raise here
    except (ValueError, TypeError) as error:
        raise SpecError(f"invalid Redis URL: {error}; give redis://host:port/0") from None
    return client, redis.exceptions


def _is_other_type(answer: Any) -> bool:
    """Whether the answer says that the key holds a value of another type than a block's."""
    return isinstance(answer, Exception) and str(answer).startswith("WRONGTYPE")


def _is_count(answer: Any) -> TypeGuard[int]:
    """Whether an answer is a valid number of bytes."""
    return type(answer) is int and answer >= 0


def _batches(keys: Sequence[str], sizes: Sequence[int]) -> Iterator[list[str]]:
    """Batch keys of known sizes to at most 32 MiB per round trip."""
    batch, waiting = list[str](), 0
    for key, size in zip(keys, sizes, strict=False):
        if batch and waiting + size > _BATCH_BYTES:
            yield batch
            batch, waiting = [], 0
        batch.append(key)
        waiting += size
    if batch:
        yield batch
