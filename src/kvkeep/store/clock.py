"""Clock: deadlines for calls over a network, which hold whatever the server does."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from math import inf
from typing import Any


class Clock(threading.local):
    """The deadline of the current thread's call, in seconds of `time.monotonic`."""

    def __init__(self) -> None:
        self.until = inf

    @contextmanager
    def running(self, seconds: float) -> Iterator[None]:
        """Limit the enclosed code to `seconds`; a nested limit cannot extend the outer one."""
        before = self.until
        self.until = min(before, time.monotonic() + seconds)
        try:
            yield
        finally:
            self.until = before

    def left(self) -> float:
        """Seconds until the deadline; infinite if there is none.

        Raises:
            TimeoutError: the deadline has passed.
        """
        left = self.until - time.monotonic()
        if left <= 0:
            raise TimeoutError("the call exceeded its deadline")
        return left


class Punctual:
    """A socket whose timeout for one operation never extends past a clock's deadline. Without this,
    a server that sends a byte now and then would keep its client waiting forever."""

    def __init__(self, inner: Any, clock: Clock) -> None:
        self._inner, self._clock, self._timeout = inner, clock, inner.gettimeout()

    def settimeout(self, seconds: float | None) -> None:
        """Set the timeout of one operation."""
        self._timeout = seconds
        self._inner.settimeout(seconds)

    def sendall(self, *args: Any) -> None:
        """See `socket.socket`; so for the next two methods."""
        self._limited().sendall(*args)

    def recv(self, *args: Any) -> bytes:
        data: bytes = self._limited().recv(*args)
        return data

    def recv_into(self, *args: Any) -> int:
        count: int = self._limited().recv_into(*args)
        return count

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def _limited(self) -> Any:
        left = self._clock.left()
        if left < inf:
            self._inner.settimeout(left if self._timeout is None else min(self._timeout, left))
        return self._inner


def punctual(connection: type, clock: Clock) -> type:
    """A subclass of a redis-py connection class whose sockets observe the clock's deadline."""

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
