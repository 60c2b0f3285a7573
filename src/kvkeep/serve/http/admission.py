"""Admission: limits on waiting requests, and the order in which they are parsed."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TypeVar, final

from kvkeep.serve.limits import Limits
from kvkeep.serve.refused import RequestError

_Parsed = TypeVar("_Parsed")


@final
class Admission:
    """Limits the requests of each client, and parses one request at a time.

    Attributes:
        unparsed: requests that are being parsed or wait for the parser.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits, self.unparsed = limits, 0
        self._admitted = Counter[str]()
        # asyncio's locks are fair. Each client has at most one request that waits for the parser,
        # so clients take turns there, however many requests a client has.
        self._first = defaultdict[str, asyncio.Lock](asyncio.Lock)
        self._parser = asyncio.Lock()

    @contextmanager
    def place(self, client: str) -> Iterator[None]:
        """Admit a request of a client for as long as the context is open.

        Raises:
            RequestError: status 429, too many requests of that client wait.
        """
        if self._admitted[client] >= self._limits.queue + self._limits.sequences:
            full = (
                f"{self._limits.queue} requests wait already, which is the limit; try again later"
            )
            raise RequestError(full, code="queue_full", status=429)
        self._admitted[client] += 1
        try:
            yield
        finally:
            self._admitted[client] -= 1

    @asynccontextmanager
    async def turn(self, client: str) -> AsyncIterator[None]:
        """Wait until this client holds no other turn, then hold it while the context is open."""
        self.unparsed += 1
        try:
            async with self._first[client]:
                yield
        finally:
            self.unparsed -= 1

    @asynccontextmanager
    async def patience(self) -> AsyncIterator[asyncio.Timeout]:
        """Limit the time that a request waits for other requests.

        Raises:
            RequestError: status 503, the request waited too long.
        """
        try:
            async with asyncio.timeout(self._limits.wait_s) as waiting:
                yield waiting
        except TimeoutError:
            late = (
                f"the request waited {self._limits.wait_s:g} s, which is the limit; try again later"
            )
            raise RequestError(late, code="waited_too_long", status=503) from None

    async def parsed(self, parse: Callable[[], _Parsed], waiting: asyncio.Timeout) -> _Parsed:
        """Parse a request in a thread, one at a time. Parsing does not count as waiting."""
        async with self._parser:
            clock = asyncio.get_running_loop().time
            left = (waiting.when() or 0) - clock()
            waiting.reschedule(None)
            found = await in_thread(parse)
            waiting.reschedule(clock() + left)
            return found


async def in_thread(do: Callable[[], _Parsed]) -> _Parsed:
    """Call a function in a thread. A cancelled caller waits for the call to return, so that the
    next request waits outside a thread, where it can be cancelled."""
    calling = asyncio.ensure_future(asyncio.to_thread(do))
    try:
        return await asyncio.shield(calling)
    finally:
        await asyncio.gather(calling, return_exceptions=True)
