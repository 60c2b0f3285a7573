"""Places: how many requests of each name a server has taken in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import final

from kvkeep.serve.limits import Limits
from kvkeep.serve.requests import RequestError

RETRY_S = 5


@final
class Places:
    """Bounds the requests of each name that are answered or wait."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._taken: Counter[str] = Counter()

    @contextmanager
    def place(self, name: str) -> Iterator[None]:
        """A place for a request of a name, for as long as the context is open.

        Raises:
            RequestError: status 429, too many requests of that name wait.
        """
        if self._taken[name] >= self._limits.queue + self._limits.sequences:
            raise RequestError(
                f"{self._limits.queue} requests wait already, which is the limit; try again later",
                code="queue_full",
                status=429,
                retry_s=RETRY_S,
            )
        self._taken[name] += 1
        try:
            yield
        finally:
            self._taken[name] -= 1
            if not self._taken[name]:
                del self._taken[name]


def waited_too_long(limits: Limits) -> RequestError:
    """The refusal of a request whose turn did not come in time."""
    return RequestError(
        f"the request waited {limits.wait_s:g} s for others, which is the limit; try again later",
        code="waited_too_long",
        status=503,
        retry_s=RETRY_S,
    )
