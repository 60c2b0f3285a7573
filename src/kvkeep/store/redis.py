"""Redis: blocks in a Redis or Valkey server, for many machines."""

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
    Block,
    Label,
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
"""How URLs of such servers begin, and what the client calls that."""

_SHA = {
    script: hashlib.sha1(script.encode(), usedforsecurity=False).hexdigest()
    for script in (PUT, TOUCH, DELETE, SET_ASIDE, PAGE, FIT)
}
_MOST = 512 * 2**20  # bytes of a value
_AT_ONCE = 32 * 2**20  # bytes sent or asked for in one journey
_PAGE = 256  # keys of a scan, and labels, in one journey
_LABELS = 16
_MOST_PAGES = 1 << 16  # of a listing: a server may say that there is ever more
_ASIDE_MS = 24 * 3600 * 1000  # the life of what was found damaged

Command = tuple[Any, ...]


@final
class Redis(Remote):
    """A Redis (5 or newer) or Valkey server, no cluster. A prompt of many blocks is asked for at
    once.

    The server keeps the budget and forgets what expired, in scripts that nothing comes between, so
    that clients may be killed as they like. What is damaged is kept aside for a day under a name of
    its own. A server that does not answer is a miss, and is left alone for some seconds.

    Args:
        url: `redis://[user:password@]host[:port][/database]`, `rediss://` over TLS,
            `unix:///path`; `valkey://` is the same as `redis://`.
        budget: most bytes of all blocks; those used longest ago go first. It holds for what this
            client puts. None: as many as come, or as the server's `maxmemory` allows.
        ttl: seconds after its last use by this client a block is dropped. None: it stays.
        timeout: seconds to wait for a connection, for an answer that does not come or does not go
            on, and for a block to be sent.
        deadline: seconds that a call may take over all, however its answer comes; what is not there
            by then is a miss. A listing of the whole server (`scan`, `gc`) has as long for each of
            its pages, of which at most 65536 are read.
        name: how all keys begin, before a colon; stores of other names know nothing of each other.

    Raises:
        SpecError: any of these cannot be. Whether the server is there is not asked.
        UnsupportedError: the client's library is not installed.
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
            raise SpecError(f"scheme {scheme[:20]!r} of a Redis URL; give one of {list(SCHEMES)}")
        require_budget(budget)
        if ttl is not None and not 1 <= ttl < inf:
            raise SpecError(f"a life of {ttl} seconds; give at least 1, or None")
        if not 0 < timeout < inf:
            raise SpecError(f"a timeout of {timeout} seconds; give more than 0, such as 2")
        if not 0 < deadline < inf:
            raise SpecError(f"a deadline of {deadline} seconds; give more than 0, such as 10")
        if not re.fullmatch(r"[\w.:{}-]+", name):
            raise SpecError(f"name {name!r}; give letters, digits and any of _.:-{{}}")
        self.budget = budget
        self.ttl = ttl
        self._clock, self._deadline = Clock(), deadline
        address = f"{SCHEMES[scheme]}://{rest}"
        self._client, self._errors = _client(address, timeout, self._clock)
        self._base, self._aside = f"{name}:block:", f"{name}:quarantine:"
        self._accounts = (f"{name}:used", f"{name}:index", f"{name}:sizes")
        self._life = "" if ttl is None else int(ttl * 1000)

    def get(self, key: str, *, used: bool = True) -> Block | None:
        with self._clock.running(self._deadline):
            if not self._fits(self._sizes([key])[0]):
                return None
            return self._got([key], used)[0]

    def put(self, block: Block) -> bool:
        with self._clock.running(self._deadline):
            return self.contains(block.key) or self.put_all([block]) == 1

    def contains(self, key: str) -> bool:
        return bool(self._sizes([key])[0])

    def delete(self, key: str) -> None:
        self._sent([self._script(DELETE, key)])

    def quarantine(self, key: str) -> None:
        self.damaged += 1
        name = self._aside + uuid.uuid4().hex
        self._sent([self._script(SET_ASIDE, key, name, _ASIDE_MS)])

    def scan(self, prefix: str = "") -> Iterator[str]:
        own = prefix.encode(errors="replace")
        start = b"[" + own if own else b"-"
        stop = b"(" + own + b"\xff" if own else b"+"
        before = b""
        for _ in range(_MOST_PAGES):
            [page] = self._sent([self._script(PAGE, start, stop, _PAGE)]) or [None]
            if not isinstance(page, list) or not all(isinstance(key, bytes) for key in page):
                return
            last, *found = page or [b""]
            yield from filter(is_key, (key.decode(errors="replace") for key in found))
            if last <= before:  # none is left, or the server goes in circles
                return
            start, before = b"(" + last, last

    def leading(self, keys: Sequence[str]) -> list[Block]:
        found: list[Block] = []
        with self._clock.running(self._deadline):
            for batch in _batches(keys, self._readable(keys)):
                for block in self._got(batch, used=True):
                    if block is None:
                        return found
                    found.append(block)
        return found

    def missing(self, keys: Sequence[str]) -> list[str]:
        return [key for key, size in zip(keys, self._sizes(keys), strict=True) if size == 0]

    def put_all(self, blocks: Iterable[Block]) -> int:
        with self._clock.running(self._deadline):
            return self._put_each(blocks)

    def _put_each(self, blocks: Iterable[Block]) -> int:
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
            if size >= _AT_ONCE:
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
            answers = self._sent(asked) or [b""] * len(some)
            found += [
                self._label(key, data or None if isinstance(data, bytes) else None)
                for key, data in zip(some, answers, strict=True)
            ]
        return found

    def gc(self, older_than: float = ABANDONED_S, budget: int | None = None) -> int:
        require_budget(budget)
        base = self._base.encode()
        for names in self._walk(self._base):  # of which the server lost the account
            keys = [name[len(base) :] for name in names]
            self._sent([self._script(TOUCH, self._life, 1, *keys)])
        freed = 0
        for names in self._walk(self._aside):
            for name in names:
                left, size = self._sent([("PTTL", name), ("STRLEN", name)]) or (None, None)
                if type(left) is int and _ASIDE_MS - left >= older_than * 1000:
                    self._sent([("UNLINK", name)])
                    freed += size if _is_count(size) else 0
        return freed + self._fitted(budget, thorough=True)[0]

    def exists(self) -> bool:
        return self._sent([("EXISTS", self._accounts[2])]) == [1]

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
        return self._fitted(None, thorough=False)[1]

    def _sizes(self, keys: Sequence[str]) -> list[int | None]:
        """Bytes of blocks, 0 for what is none; None where the server does not say."""
        answers = self._sent([("STRLEN", self._base + key) for key in keys])
        return [
            0 if _is_other_type(answer) else answer if _is_count(answer) else None
            for answer in answers or [None] * len(keys)
        ]

    def _readable(self, keys: Sequence[str]) -> list[int]:
        """Bytes of the first blocks that are there, up to one that does not fit the memory."""
        sizes = takewhile(lambda size: size and self._fits(size), self._sizes(keys))
        return [size for size in sizes if size]

    def _fits(self, size: int | None) -> bool:
        """Whether a block may be read, of which the server says the size."""
        most = min(_MOST, most_bytes())
        if size is not None and size > most:
            self._failed(MemoryError(f"a block of {size} bytes, but {most} may be read"))
            return False
        return True

    def _got(self, keys: Sequence[str], used: bool) -> list[Block | None]:
        asked: list[Command] = [("GET", self._base + key) for key in keys]
        if used:
            asked.append(self._script(TOUCH, self._life, 0, *keys))
        answers = self._sent(asked)
        if answers is None:
            return [None] * len(keys)
        return [self._block(key, data) for key, data in zip(keys, answers, strict=False)]

    def _block(self, key: str, data: Any) -> Block | None:
        if data is None or (isinstance(data, Exception) and not _is_other_type(data)):
            return None
        return self._checked(key, data)

    def _put(self, commands: Sequence[Command]) -> int:
        return sum(answer == 1 for answer in (self._sent(commands) or []))

    def _fitted(self, budget: int | None, *, thorough: bool) -> tuple[int, int]:
        """Bytes that were freed until the rest fits a budget, and the bytes of the rest."""
        script = self._script(FIT, "" if budget is None else budget, int(thorough))
        [answer] = self._sent([script]) or [None]
        if isinstance(answer, list) and len(answer) == 2 and all(map(_is_count, answer)):
            return answer[0], answer[1]
        return 0, 0

    def _walk(self, beginning: str) -> Iterator[list[bytes]]:
        """All names in the server that begin so, some at once; some may come twice."""
        cursor: Any = 0
        for _ in range(_MOST_PAGES):
            pattern = ("MATCH", beginning + "*", "COUNT", 1000)
            [answer] = self._sent([("SCAN", cursor, *pattern)]) or [None]
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

    def _sent(self, commands: Sequence[Command]) -> list[Any] | None:
        """The answers to commands that are sent at once, or None where none came. A command that
        the server refuses is answered by an error."""
        if not commands:
            return []
        answers = self._asked(lambda: self._journey(commands), None)
        for command, answer in zip(commands, answers or (), strict=False):
            known = _is_other_type(answer) and command[0] != "EVALSHA"
            if isinstance(answer, Exception) and not known:
                self._failed(answer)
        return answers

    def _journey(self, commands: Sequence[Command]) -> list[Any]:
        with self._clock.running(self._deadline):
            answers = self._piped(commands)
            if any(isinstance(answer, self._errors.NoScriptError) for answer in answers):
                self._piped([("SCRIPT LOAD", script) for script in _SHA])  # it was started again
                answers = self._piped(commands)
        if len(answers) != len(commands):
            raise ConnectionError(f"{len(answers)} answers to {len(commands)} commands")
        return answers

    def _piped(self, commands: Sequence[Command]) -> list[Any]:
        with self._client.pipeline(transaction=False) as pipe:
            for command in commands:
                pipe.execute_command(*command)
            answers: list[Any] = pipe.execute(raise_on_error=False)
        return answers


def _client(url: str, timeout: float, clock: Clock) -> tuple[Any, Any]:
    """The library's client, which is safe for threads and forks, keeps to a clock and never tries
    twice; and its exceptions.

    Raises:
        MissingPackageError: the library is not installed.
        SpecError: the URL cannot be.
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
        raise SpecError(f"a Redis URL that cannot be: {error}; give redis://host:port/0") from None
    return client, redis.exceptions


def _is_other_type(answer: Any) -> bool:
    """Whether a key is taken by something else than a block."""
    return isinstance(answer, Exception) and str(answer).startswith("WRONGTYPE")


def _is_count(answer: Any) -> TypeGuard[int]:
    """Whether an answer is a number of bytes."""
    return type(answer) is int and answer >= 0


def _batches(keys: Sequence[str], sizes: Sequence[int]) -> Iterator[list[str]]:
    """The keys of known sizes, as many at once as one journey should bring."""
    batch, waiting = list[str](), 0
    for key, size in zip(keys, sizes, strict=False):
        if batch and waiting + size > _AT_ONCE:
            yield batch
            batch, waiting = [], 0
        batch.append(key)
        waiting += size
    if batch:
        yield batch
