"""Listening: a port that is free, and a server on it until it is told to stop."""

from __future__ import annotations

import asyncio
import copy
import errno
import ipaddress
import logging
import signal
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import cast

import uvicorn
from starlette.applications import Starlette
from uvicorn.config import LOGGING_CONFIG

from kvkeep.errors import StateError
from kvkeep.serve.connection import Connection
from kvkeep.serve.limits import Limits

_GRACE_S = 5  # for requests that are being answered when the server is told to stop
_MOST_GRACE_S = 60  # for one whose prompt is being read then
_BACKLOG = 2048
_KEEP_ALIVE_S = 5  # that a connection is kept for a client's next request


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a host."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def bind(host: str, port: int) -> socket.socket:
    """A socket on a host's port, 0 for any free one; nobody can connect before it listens.

    Raises:
        StateError: the port is in use, or there is no such host here.
    """
    try:
        family, kind, *_, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind)
    except OSError as error:
        raise StateError(f"no host {host!r}: {error}; give --host 127.0.0.1") from error
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise _refused(host, port, error) from error
    return bound


def listen(bound: socket.socket) -> str:
    """Let clients connect; they wait until the server runs. Where they find it.

    Raises:
        StateError: another process has begun to listen on the port meanwhile.
    """
    host, port = bound.getsockname()[:2]
    try:
        bound.listen(_BACKLOG)
    except OSError as error:
        raise _refused(host, port, error) from error
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"


def configured(app: Starlette, limits: Limits) -> uvicorn.Config:
    """uvicorn's settings for an application: connections that wait for no client, no websockets,
    and a log, on stderr, without query strings."""
    log = copy.deepcopy(LOGGING_CONFIG)
    log["filters"] = {"path": {"()": _PathOnly}}
    log["handlers"]["access"] |= {"stream": "ext://sys.stderr", "filters": ["path"]}
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
    """Serve until SIGINT or SIGTERM; what is being answered then has some seconds to finish.

    Args:
        bound: from `bind`.
        limits: of its connections.
        announce: told the URL as soon as clients can connect.
        stop: ends what is being answered; called after those seconds, in a thread.

    Raises:
        StateError: see `listen`.
    """
    server = _Server(configured(app, limits), stop)
    if threading.current_thread() is threading.main_thread():
        # Both signals end the server alike; uvicorn raises them again when it has shut down.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    with suppress(KeyboardInterrupt):
        announce(listen(bound))
        server.run(sockets=[bound])


class _PathOnly(logging.Filter):
    """Keeps query strings, where some clients put keys, out of the access log."""

    def filter(self, record: logging.LogRecord) -> bool:
        client, method, path, *rest = cast(tuple[str, ...], record.args)
        record.args = (client, method, path.partition("?")[0], *rest)
        return True


class _Server(uvicorn.Server):
    """One that ends long answers itself, so that their clients are told why."""

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


def _refused(host: str, port: int, error: OSError) -> StateError:
    if error.errno == errno.EADDRINUSE:
        return StateError(
            f"port {port} of {host} is in use; stop what listens there, or give another --port"
        )
    return StateError(f"cannot listen on {host}, port {port}: {error.strerror}")
