"""Turns: who is answered next, who has to wait, and who is sent away."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import final

from kvkeep.serve.limits import Limits
from kvkeep.serve.requests import RequestError

_RETRY_S = 5


@final
class Place:
    """One request among those that wait."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.turn: asyncio.Future[None] | None = None
        self.holds = False

    def hand_over(self) -> None:
        """The turn is another's to end, by `Turns.done`."""
        self.holds = False


@final
class Turns:
    """Lets one request at a time through. Names take turns; the requests of one go in order.

    It belongs to an event loop: all methods are to be called in its thread.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._taken: Counter[str] = Counter()
        self._waiting: dict[str, deque[Place]] = {}  # the first name is next
        self._busy = False

    @property
    def waiting(self) -> int:
        """How many requests wait for their turn."""
        return sum(map(len, self._waiting.values()))

    @contextmanager
    def place(self, name: str) -> Iterator[Place]:
        """A place in the queue of a name, for as long as the request is under way.

        Raises:
            RequestError: 429, too many requests of that name wait.
        """
        if self._taken[name] > self._limits.queue:
            raise RequestError(
                f"{self._limits.queue} requests wait, which is the limit; try again later",
                code="queue_full",
                status=429,
                retry_s=_RETRY_S,
            )
        self._taken[name] += 1
        place = Place(name)
        try:
            yield place
        finally:
            self._taken[name] -= 1
            if not self._taken[name]:
                del self._taken[name]
            self._forget(place)
            if place.holds:
                self.done()

    def deadline(self) -> float:
        """When a request that arrives now has waited too long, in the loop's time."""
        return asyncio.get_running_loop().time() + self._limits.wait_s

    async def wait(self, place: Place, deadline: float) -> None:
        """Wait until it is this request's turn, which lasts until the place is left, or, once it
        was handed over, until `done`.

        Args:
            deadline: from `deadline`, when the request arrived.

        Raises:
            RequestError: 503, its turn did not come in time.
        """
        if not self._busy:
            self._busy = place.holds = True
            return
        place.turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(place.name, deque()).append(place)
        try:
            async with asyncio.timeout_at(deadline):
                await place.turn
        except TimeoutError:
            raise RequestError(
                f"other requests took all of the {self._limits.wait_s:g} s that this one may "
                "wait; try again later",
                code="waited_too_long",
                status=503,
                retry_s=_RETRY_S,
            ) from None

    def done(self) -> None:
        """A turn is over: the next name's oldest request has it."""
        while self._waiting:
            name = next(iter(self._waiting))
            queue = self._waiting.pop(name)
            place = queue.popleft()
            if queue:
                self._waiting[name] = queue  # behind the other names
            if place.turn is not None and not place.turn.done():
                place.holds = True
                place.turn.set_result(None)
                return
        self._busy = False

    def _forget(self, place: Place) -> None:
        queue = self._waiting.get(place.name, deque())
        if place in queue:
            queue.remove(place)
            if not queue:
                del self._waiting[place.name]
