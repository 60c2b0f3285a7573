"""Clock: how long a call over a network may take, whatever the other side does."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from math import inf
from typing import Any


class Clock(threading.local):
    """The end of the call that this thread makes."""

    def __init__(self) -> None:
        self.until = inf

    @contextmanager
    def running(self, seconds: float) -> Iterator[None]:
        """Limit what runs inside to so many seconds; a nested limit cannot extend the outer one."""
        before = self.until
        self.until = min(before, time.monotonic() + seconds)
        try:
            yield
        finally:
            self.until = before

    def left(self) -> float:
        """Seconds until the end.

        Raises:
            TimeoutError: it is over.
        """
        left = self.until - time.monotonic()
        if left <= 0:
            raise TimeoutError("the answer went on for longer than a call may take")
        return left


class Punctual:
    """A socket whose own timeout, that of a single step, never reaches past a clock's end. Without
    this, a server that sends a byte now and then keeps its client waiting forever."""

    def __init__(self, inner: Any, clock: Clock) -> None:
        self._inner, self._clock, self._timeout = inner, clock, inner.gettimeout()

    def settimeout(self, seconds: float | None) -> None:
        """The timeout of a single step."""
        self._timeout = seconds
        self._inner.settimeout(seconds)

    def sendall(self, *args: Any) -> None:
        """See `socket.socket`, as the two below."""
        self._hurry().sendall(*args)

    def recv(self, *args: Any) -> bytes:
        data: bytes = self._hurry().recv(*args)
        return data

    def recv_into(self, *args: Any) -> int:
        count: int = self._hurry().recv_into(*args)
        return count

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def _hurry(self) -> Any:
        left = self._clock.left()
        if left < inf:
            self._inner.settimeout(left if self._timeout is None else min(self._timeout, left))
        return self._inner


def punctual(connection: type, clock: Clock) -> type:
    """A class of connections like one of redis-py, whose sockets keep to a clock."""

    class Connection(connection):  # type: ignore[misc]
        socket_connect_timeout: float

        def _connect(self) -> Any:
            timeout = self.socket_connect_timeout
            self.socket_connect_timeout = min(timeout, clock.left())
            try:
                return Punctual(super()._connect(), clock)
            finally:
                self.socket_connect_timeout = timeout

    return Connection
