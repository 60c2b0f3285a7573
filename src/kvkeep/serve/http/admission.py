"""Admission: how many requests of each client a server takes in, and whose is parsed next."""

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
    """Bounds the requests of each client, and lets one request at a time be parsed.

    Attributes:
        unparsed: requests that are being parsed, or wait for it.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits, self.unparsed = limits, 0
        self._admitted = Counter[str]()
        # asyncio's locks are fair. One request of each client has its turn and waits for the
        # parser, so clients take turns there however many requests one client has.
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
        """Wait until no other request of this client has its turn, which lasts while the context is
        open."""
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
            RequestError: status 503, it waited too long.
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
        """The result of parsing a request in a thread, one request at a time. The time to parse it
        does not count as waiting."""
        async with self._parser:
            clock = asyncio.get_running_loop().time
            left = (waiting.when() or 0) - clock()
            waiting.reschedule(None)
            found = await in_thread(parse)
            waiting.reschedule(clock() + left)
            return found


async def in_thread(do: Callable[[], _Parsed]) -> _Parsed:
    """The result of a call in a thread. A cancelled caller goes on only when the call is done: the
    next request's must not wait in a thread, where it could not be cancelled."""
    calling = asyncio.ensure_future(asyncio.to_thread(do))
    try:
        return await asyncio.shield(calling)
    finally:
        await asyncio.gather(calling, return_exceptions=True)
