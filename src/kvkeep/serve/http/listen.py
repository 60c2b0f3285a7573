"""Bind a port, and run a server on it until a signal stops it."""

from __future__ import annotations

import asyncio
import copy
import errno
import ipaddress
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import uvicorn
from starlette.applications import Starlette
from uvicorn.config import LOGGING_CONFIG
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvkeep.errors import StateError
from kvkeep.serve.limits import Limits

_GRACE_S = 5  # time to finish requests after the signal
_MOST_GRACE_S = 60  # if a step of the model takes longer than that
_BACKLOG = 2048
_KEEP_ALIVE_S = 5  # lifetime of an idle connection
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


def is_loopback(host: str) -> bool:
    """Whether a host's address is a loopback address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def bind(host: str, port: int) -> socket.socket:
    """Bind a socket to a host's port (0: any free port). It accepts no connections before `listen`.

    Raises:
        StateError: the port is in use, or the host is not an address of this machine.
    """
    try:
        family, kind, *_, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise StateError(f"no host {host!r}: {error}; give --host 127.0.0.1") from error
    with ExitStack() as on_error, _refusal_of(host, port):
        bound = on_error.enter_context(socket.socket(family, kind))
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        on_error.pop_all()
    return bound


def listen(bound: socket.socket) -> str:
    """Start to accept connections, which wait until the server runs; return the server's URL.

    Raises:
        StateError: another process has started to listen on the port meanwhile.
    """
    host, port = bound.getsockname()[:2]
    with _refusal_of(host, port):
        bound.listen(_BACKLOG)
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"


def configured(app: Starlette, limits: Limits) -> uvicorn.Config:
    """uvicorn's settings: connections with timeouts, no websockets, log on stderr."""
    log = copy.deepcopy(LOGGING_CONFIG)
    log["handlers"]["access"]["stream"] = "ext://sys.stderr"
    return uvicorn.Config(
        app,
        http=type("Connection", (Connection,), {"limits": limits}),
        ws="none",
        lifespan="on",
        log_config=log,
        backlog=_BACKLOG,
        server_header=False,
        timeout_keep_alive=max(1, min(_KEEP_ALIVE_S, int(limits.timeout_s))),
        timeout_graceful_shutdown=_MOST_GRACE_S,
    )


def run(
    app: Starlette,
    bound: socket.socket,
    *,
    limits: Limits,
    announce: Callable[[str], None],
    stop: Callable[[], None],
) -> None:
    """Serve until SIGINT or SIGTERM. Requests in progress then have five seconds to finish.

    Args:
        bound: socket from `bind`.
        announce: called with the URL as soon as clients can connect.
        stop: ends the remaining answers; called five seconds after the signal, in a thread.

    Raises:
        StateError: see `listen`.
    """
    server = Server(configured(app, limits), stop)
    if threading.current_thread() is threading.main_thread():
        # Handle both signals alike; uvicorn raises them again after it has shut down.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    with suppress(KeyboardInterrupt):
        announce(listen(bound))
        server.run(sockets=[bound])


class Server(uvicorn.Server):
    """A uvicorn server that ends long answers at shutdown with an error that gives the reason.

    Args:
        config: settings from `configured`.
        stop: ends the remaining answers; called in a thread, five seconds after the shutdown began.
    """

    def __init__(self, config: uvicorn.Config, stop: Callable[[], None]) -> None:
        super().__init__(config)
        self._stop = stop

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        async def end() -> None:
            await asyncio.sleep(_GRACE_S)
            await asyncio.to_thread(self._stop)

        ending = asyncio.ensure_future(end())
        await super().shutdown(sockets)
        ending.cancel()


@contextmanager
def _refusal_of(host: str, port: int) -> Iterator[None]:
    """The error of a port that cannot be bound."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise StateError(f"cannot listen on {host}, port {port}: {error.strerror}") from error
        raise StateError(
            f"port {port} of {host} is in use; stop that server, or give another --port"
        ) from error
