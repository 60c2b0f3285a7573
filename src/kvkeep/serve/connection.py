"""Connection: one client's connection, which ends when the client lets it wait."""

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
    """uvicorn's HTTP/1.1, which by itself waits for clients as long as they like.

    Here a client has some seconds to send a request's headers, to finish sending a request that
    was answered already, and to read what was written to it; then the connection is closed. Of a
    request that is being read, the application bounds the time.
    """

    limits = Limits()

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._deadlines: dict[str, asyncio.TimerHandle] = {}

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)  # so writing pauses while anything is unread
        if len(self.connections) > self.limits.connections:
            transport.write(_FULL)
            transport.close()
        self._expect("request")

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is None or self.cycle.response_complete:
            self._expect("request")
        else:
            self._have("request")

    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect("reading")

    def resume_writing(self) -> None:
        super().resume_writing()
        self._have("reading")

    def connection_lost(self, exc: Exception | None) -> None:
        for waited in list(self._deadlines):
            self._have(waited)
        super().connection_lost(exc)

    def _expect(self, waited: str) -> None:
        if waited not in self._deadlines:
            self._deadlines[waited] = self.loop.call_later(
                self.limits.timeout_s, self.transport.abort
            )

    def _have(self, waited: str) -> None:
        if deadline := self._deadlines.pop(waited, None):
            deadline.cancel()
