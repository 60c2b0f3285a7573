"""Connection: an HTTP connection with timeouts for slow clients."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from kvkeep.serve.limits import Limits

_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\n"
    b"retry-after: 5\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
)


class Connection(H11Protocol):
    """uvicorn's HTTP/1.1 protocol, with timeouts that uvicorn lacks.

    A client has `limits.timeout_s` seconds to send a request's headers, to finish sending a request
    that was answered already, and to read what was written to it; then the connection is closed.
    The application limits the time to receive a request's body. uvicorn's `limit_concurrency`
    counts requests only, so connections are counted here.
    """

    limits = Limits()

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._timeouts: dict[str, asyncio.TimerHandle] = {}

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)  # pause writing while any data is unsent
        if len(self.connections) > self.limits.connections:
            transport.write(_FULL)
            transport.close()
        self._expect("request")

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._expect("request", self.cycle is None or self.cycle.response_complete)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect("reading")

    def resume_writing(self) -> None:
        super().resume_writing()
        self._expect("reading", False)

    def connection_lost(self, exc: Exception | None) -> None:
        for what in list(self._timeouts):
            self._expect(what, False)
        super().connection_lost(exc)

    def _expect(self, what: str, expected: bool = True) -> None:
        """Close the connection unless the client acts in time; `expected=False` cancels this."""
        if not expected and what in self._timeouts:
            self._timeouts.pop(what).cancel()
        elif expected and what not in self._timeouts:
            self._timeouts[what] = self.loop.call_later(self.limits.timeout_s, self.transport.abort)
