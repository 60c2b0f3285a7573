"""Admission: how many requests of each client a server takes in, and whose is parsed next."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import final

from kvkeep.serve.limits import Limits
from kvkeep.serve.refused import RequestError


@final
class Admission:
    """Bounds the requests of each client, and lets one request at a time be parsed.

    Attributes:
        unparsed: requests that are being parsed, or wait for it.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits, self.unparsed = limits, 0
        self._admitted = Counter[str]()
        # asyncio's locks are fair. Of each client one request holds its lock and waits for the
        # parser, so clients take turns there however many requests one has.
        self._first = defaultdict[str, asyncio.Lock](asyncio.Lock)
        self._parser = asyncio.Lock()

    @contextmanager
    def place(self, client: str) -> Iterator[None]:
        """Admit a request of a client for as long as the context is open.

        Raises:
            RequestError: status 429, too many requests of that client wait.
        """
        if self._admitted[client] >= self._limits.queue + self._limits.sequences:
            raise RequestError(
                f"{self._limits.queue} requests wait already, which is the limit; try again later",
                code="queue_full",
                status=429,
            )
        self._admitted[client] += 1
        try:
            yield
        finally:
            self._admitted[client] -= 1

    @asynccontextmanager
    async def parsing(self, client: str) -> AsyncIterator[None]:
        """Wait until it is this request's turn to be parsed, which lasts while the context is
        open."""
        self.unparsed += 1
        try:
            async with self._first[client], self._parser:
                yield
        finally:
            self.unparsed -= 1

    def waited_too_long(self) -> RequestError:
        """The refusal of a request that waited too long for others."""
        return RequestError(
            f"the request waited {self._limits.wait_s:g} s for others, which is the limit; try "
            "again later",
            code="waited_too_long",
            status=503,
        )
