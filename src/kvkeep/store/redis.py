"""Redis: blocks in a Redis or Valkey server, which machines can share."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from importlib import import_module
from math import inf
from threading import Timer, local
from typing import Any, ClassVar, TypeVar, final

from kvkeep.errors import SpecError
from kvkeep.extras import needed_by
from kvkeep.store.backend import ABANDONED_S, Remote, most_bytes, require_seconds
from kvkeep.store.block import DIGEST, StoredBlock, is_key, starts_key

_SCHEMES = {
    "redis": "redis",
    "rediss": "rediss",
    "unix": "unix",
    "valkey": "redis",
    "valkeys": "rediss",
}  # URL scheme -> the client library's scheme

_MOST = 512 * 2**20  # bytes of a value
_BATCH_BYTES = 32 * 2**20  # sent or requested in one round trip
_MOST_PAGES = 1 << 16  # pages of a listing, which a faulty server could make endless
_ALIKE = 256  # most keys in the sorted set of one beginning: the newest keys
_QUARANTINE_MS = 24 * 3600 * 1000  # how long a damaged block is kept

_BEGINNING = re.compile(r"[0-9a-f]{64}/[0-9a-f]{64}/[0-9a-f]{8,16}")  # of a block's key

Command = tuple[Any, ...]
Kind = TypeVar("Kind")


@final
class Redis(Remote):
    """A Redis (5 or newer) or Valkey server; clusters are not supported. The blocks of a prompt are
    requested in batches.

    The server evicts blocks by its own policy, and any key may vanish at any time. For each
    beginning of keys (see `kvkeep.store.block.beginning`), the server also holds a sorted set of
    the newest keys. A damaged block stays in quarantine, under another key, for a day. After a
    failure, calls return a miss for five seconds.

    Args:
        url: `redis://[user:password@]host[:port][/database]`, `rediss://` over TLS,
            `unix:///path`; `valkey://` is the same as `redis://`.
        budget: None; the limit is the server's `maxmemory`.
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
    schemes = tuple(_SCHEMES)

    def __init__(
        self,
        url: str,
        budget: int | None = None,
        ttl: float | None = None,
        timeout: float = 2.0,
        name: str = "kvkeep",
        deadline: float = 10.0,
    ) -> None:
        scheme, _, rest = url.partition("://")
        if scheme not in _SCHEMES:
            raise SpecError(
                f"URL scheme {scheme[:20]!r} is not valid for Redis; give one of {list(_SCHEMES)}"
            )
        _require_no_budget(budget)
        if ttl is not None and not 1 <= ttl < inf:
            raise SpecError(f"a ttl of {ttl} seconds; give at least 1, or None")
        require_seconds("timeout", timeout, 2)
        require_seconds("deadline", deadline, 10)
        if not re.fullmatch(r"[\w.:{}-]+", name):
            raise SpecError(f"name {name!r} is not valid; give letters, digits or any of _.:-{{}}")
        self.ttl = ttl
        self._life = None if ttl is None else int(ttl * 1000)
        self._server = _Server(f"{_SCHEMES[scheme]}://{rest}", timeout, deadline)
        self._base, self._alike = f"{name}:block:", f"{name}:alike:"
        self._quarantined = f"{name}:quarantine:"

    def as_one_call(self) -> AbstractContextManager[None]:
        return self._server.call()

    def delete(self, key: str) -> None:
        name, alike = self._names(key)
        self._send([("UNLINK", name), ("ZREM", alike, key[-DIGEST:])], int)

    def quarantine(self, key: str) -> None:
        self.damaged += 1
        (name, alike), target = self._names(key), self._quarantined + uuid.uuid4().hex
        expire = ("PEXPIRE", name, _QUARANTINE_MS)  # first, so that a killed client leaves no block
        self._send([expire, ("RENAME", name, target), ("ZREM", alike, key[-DIGEST:])], int)

    def scan(self, prefix: str = "") -> Iterator[str]:
        """Iterate over the keys that start with `prefix`; if `prefix` is a complete beginning, over
        the newest 256 of them."""
        names: Iterable[bytes] = ()
        if _BEGINNING.fullmatch(prefix):
            [found] = self._send([("ZREVRANGE", self._alike + prefix, 0, -1)], list)
            start = (self._base + prefix).encode()
            names = [start + own for own in found or () if isinstance(own, bytes)]
        elif starts_key(prefix):
            names = self._listed(self._base + prefix)
        seen = set[str]()
        for name in names:
            key = name.decode(errors="replace").removeprefix(self._base)
            if is_key(key) and key not in seen:
                seen.add(key)
                yield key

    def put_all(self, blocks: Iterable[StoredBlock]) -> int:
        done, waiting, nbytes = 0, list[Command](), 0
        with self.as_one_call():
            for block in blocks:
                if self.resting:
                    return done
                data = block.to_bytes()
                if len(data) > _MOST:
                    continue
                waiting += self._putting(block.key, data)
                nbytes += len(data)
                if nbytes >= _BATCH_BYTES:
                    done += self._put(waiting)
                    waiting, nbytes = [], 0
            return done + self._put(waiting)

    def gc(self, older_than: float = ABANDONED_S, budget: int | None = None) -> int:
        _require_no_budget(budget)
        freed = 0
        for name in self._listed(self._quarantined):
            left, size = self._send([("PTTL", name), ("STRLEN", name)], int)
            if left is not None and _QUARANTINE_MS - left >= older_than * 1000:
                self._send([("UNLINK", name)], int)
                freed += max(0, size or 0)
        return freed

    def exists(self) -> bool:
        return next(self._listed(self._base), None) is not None

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks. The server counts this as a use of every block."""
        return sum(max(0, size or 0) for size in self._sizes([*self.scan()]))

    def _sizes(self, keys: Sequence[str]) -> list[int | None]:
        """Sizes of blocks in bytes; 0 for a missing block, None if unknown."""
        return self._send([("STRLEN", self._base + key) for key in keys], int)

    def _exist(self, keys: Sequence[str]) -> list[bool | None]:
        return [None if size is None else size > 0 for size in self._sizes(keys)]

    def _batches(self, keys: Sequence[str]) -> Iterator[list[str]]:
        """The keys in batches of at most 32 MiB, up to the first block that is missing or too large
        for the memory."""
        most, batch, waiting = min(_MOST, most_bytes()), list[str](), 0
        for key, size in zip(keys, self._sizes(keys), strict=True):
            if not size or size < 0:
                break
            if size > most:
                self._failed(MemoryError(f"a block of {size} bytes, but at most {most} are read"))
                break
            if batch and waiting + size > _BATCH_BYTES:
                yield batch
                batch, waiting = [], 0
            batch.append(key)
            waiting += size
        if batch:
            yield batch

    def _data(self, keys: Sequence[str], most: int | None = None) -> list[Any]:
        names = [self._base + key for key in keys]
        if most is not None:
            return self._send([("GETRANGE", name, 0, most - 1) for name in names], bytes)
        [found] = self._send([("MGET", *names)], list)
        return found if found is not None and len(found) == len(keys) else [None] * len(keys)

    def _used(self, keys: Sequence[str]) -> None:
        names = [name for key in keys for name in self._names(key)]
        if self._life is not None:
            self._send([("PEXPIRE", name, self._life) for name in names], int)

    def _names(self, key: str) -> tuple[str, str]:
        """The names of a block and of the sorted set with its key."""
        return self._base + key, self._alike + key[:-DIGEST]

    def _putting(self, key: str, data: bytes) -> list[Command]:
        """The commands that store a block, `SET` first."""
        name, alike = self._names(key)
        life = () if self._life is None else ("PX", self._life)
        commands: list[Command] = [
            ("SET", name, data, *life),
            ("ZADD", alike, time.time(), key[-DIGEST:]),
            ("ZREMRANGEBYRANK", alike, 0, -_ALIKE - 1),
        ]
        return commands if self._life is None else [*commands, ("PEXPIRE", alike, self._life)]

    def _put(self, commands: Sequence[Command]) -> int:
        """Send commands that store blocks; returns how many are stored."""
        pairs = zip(commands, self._send(commands, bool), strict=True)
        return sum(command[0] == "SET" and stored is True for command, stored in pairs)

    def _listed(self, start: str) -> Iterator[bytes]:
        """Yield all names in the server that start with `start`; some may be repeated."""
        cursor = 0
        for _ in range(_MOST_PAGES):
            scan = ("SCAN", cursor, "MATCH", start + "*", "COUNT", 1000)
            match self._send([scan], tuple)[0]:
                case (int(cursor), [*names]) if all(isinstance(name, bytes) for name in names):
                    yield from names
                case _:
                    return
            if not cursor:
                return

    def _send(self, commands: Sequence[Command], kind: type[Kind]) -> list[Kind | None]:
        """Send commands in one round trip and return their answers; None for a command that failed
        or was answered by another type. An empty value if a key holds something else."""
        unknown: list[Any] = [None] * len(commands)
        found: list[Kind | None] = []
        answers = partial(self._server.answers, commands)
        for answer in self._asked(answers, unknown) if commands else ():
            if isinstance(answer, Exception):
                elsewhere = str(answer).startswith(("WRONGTYPE", "no such key"))
                if not elsewhere:
                    self._failed(answer)
                found.append(kind() if elsewhere else None)
            else:
                found.append(answer if type(answer) is kind else None)
        return found


class _Call(local):
    """The deadline of a thread's present call; infinite outside of a call."""

    until = inf


class _Server:
    """A client of a server, which gives each call `deadline` seconds. Threads may share it."""

    def __init__(self, url: str, timeout: float, deadline: float) -> None:
        self._client, self._deadline, self._call = _client(url, timeout), deadline, _Call()

    @contextmanager
    def call(self) -> Iterator[None]:
        """A context whose calls share one deadline. When it passes, the connections are closed;
        otherwise a server that sends single bytes slowly would keep its client waiting forever."""
        if self._call.until < inf:
            yield
            return
        self._call.until = time.monotonic() + self._deadline
        timer = Timer(self._deadline, self._client.connection_pool.disconnect)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            self._call.until = inf

    def answers(self, commands: Sequence[Command]) -> list[Any]:
        """The answers to commands, sent in one round trip; an exception for a refused command.

        Raises:
            Exception: any exception, if the server did not answer.
        """
        with self.call():
            try:
                self._require_time()
                answers = self.pipeline(commands)
            except Exception:
                self._require_time()  # the deadline closed the connection
                raise
        if len(answers) != len(commands):
            raise ConnectionError(f"{len(answers)} answers to {len(commands)} commands")
        return answers

    def _require_time(self) -> None:
        if time.monotonic() >= self._call.until:
            raise TimeoutError("the call exceeded its deadline")

    def pipeline(self, commands: Sequence[Command]) -> list[Any]:
        """Send commands and receive answers."""
        with self._client.pipeline(transaction=False) as pipe:
            for command in commands:
                pipe.execute_command(*command)
            answers: list[Any] = pipe.execute(raise_on_error=False)
        return answers


def _client(url: str, timeout: float) -> Any:
    """The library's client, safe for threads and forks, without retries.

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
        pool.connection_class(**pool.connection_kwargs)  # raises for unknown options
    except (ValueError, TypeError) as error:
        raise SpecError(f"invalid Redis URL: {error}; give redis://host:port/0") from None
    return client


def _require_no_budget(budget: int | None) -> None:
    if budget is not None:
        raise SpecError(
            f"a budget of {budget} bytes, but Redis limits its own memory; give no budget, "
            f"and run `redis-cli config set maxmemory {budget}` and `redis-cli config set "
            "maxmemory-policy allkeys-lru`"
        )
