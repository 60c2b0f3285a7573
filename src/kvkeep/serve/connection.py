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
    The application limits the time to receive a request's body.
    """

    limits = Limits()

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._deadlines: dict[str, asyncio.TimerHandle] = {}

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)  # pause writing while any data is unread
        if len(self.connections) > self.limits.connections:
            transport.write(_FULL)
            transport.close()
        self._start_timeout("request")

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is None or self.cycle.response_complete:
            self._start_timeout("request")
        else:
            self._cancel_timeout("request")

    def pause_writing(self) -> None:
        super().pause_writing()
        self._start_timeout("reading")

    def resume_writing(self) -> None:
        super().resume_writing()
        self._cancel_timeout("reading")

    def connection_lost(self, exc: Exception | None) -> None:
        for waited in list(self._deadlines):
            self._cancel_timeout(waited)
        super().connection_lost(exc)

    def _start_timeout(self, waited: str) -> None:
        if waited not in self._deadlines:
            self._deadlines[waited] = self.loop.call_later(
                self.limits.timeout_s, self.transport.abort
            )

    def _cancel_timeout(self, waited: str) -> None:
        if deadline := self._deadlines.pop(waited, None):
            deadline.cancel()
