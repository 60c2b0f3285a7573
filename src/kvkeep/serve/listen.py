"""Listening: a port that is free, and a server on it until it is told to stop."""

from __future__ import annotations

import copy
import errno
import ipaddress
import signal
import socket
import threading
from contextlib import suppress

import uvicorn
from starlette.applications import Starlette
from uvicorn.config import LOGGING_CONFIG

from kvkeep.errors import StateError

_GRACE_S = 5  # for requests that are being answered when the server is told to stop
_BACKLOG = 2048


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


def run(app: Starlette, bound: socket.socket) -> None:
    """Serve until SIGINT or SIGTERM; what is being answered then has some seconds to finish."""
    logging = copy.deepcopy(LOGGING_CONFIG)
    logging["handlers"]["access"]["stream"] = "ext://sys.stderr"
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            lifespan="on",
            log_config=logging,
            backlog=_BACKLOG,
            timeout_graceful_shutdown=_GRACE_S,
        )
    )
    if threading.current_thread() is threading.main_thread():
        # uvicorn raises the signal again once it has shut down: then the process ends by itself.
        signal.signal(signal.SIGTERM, lambda *_: None)
    with suppress(KeyboardInterrupt):
        server.run(sockets=[bound])


def _refused(host: str, port: int, error: OSError) -> StateError:
    if error.errno == errno.EADDRINUSE:
        return StateError(
            f"port {port} of {host} is in use; stop what listens there, or give another --port"
        )
    return StateError(f"cannot listen on {host}, port {port}: {error.strerror}")
