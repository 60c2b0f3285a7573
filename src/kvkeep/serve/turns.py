"""Turns: a fair queue that lets one request through at a time."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import final


@final
class Place:
    """A request's place in the queue."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.turn: asyncio.Future[None] | None = None
        self.holds = False

    def hand_over(self) -> None:
        """Keep the turn after the place is left, until `Turns.done` is called."""
        self.holds = False


@final
class Turns:
    """Lets one request through at a time. Names are served in turn, and the requests of one name in
    order of arrival.

    All methods must be called in the event loop's thread.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, deque[Place]] = {}  # names in the order of their next turn
        self._busy = False

    @property
    def waiting(self) -> int:
        """Number of requests that wait for their turn."""
        return sum(map(len, self._waiting.values()))

    @contextmanager
    def place(self, name: str) -> Iterator[Place]:
        """A place in the queue of a name, for as long as the context is open."""
        place = Place(name)
        try:
            yield place
        finally:
            self._leave_queue(place)
            if place.holds:
                self.done()

    async def wait(self, place: Place, deadline: float) -> None:
        """Wait for this request's turn. The turn lasts until the place is left or, after
        `Place.hand_over`, until `done`.

        Args:
            deadline: in the event loop's time.

        Raises:
            TimeoutError: the turn did not come in time.
        """
        if not self._busy:
            self._busy = place.holds = True
            return
        place.turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(place.name, deque()).append(place)
        async with asyncio.timeout_at(deadline):
            await place.turn

    def done(self) -> None:
        """End the current turn; the oldest request of the next name gets it."""
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

    def _leave_queue(self, place: Place) -> None:
        queue = self._waiting.get(place.name, deque())
        if place in queue:
            queue.remove(place)
            if not queue:
                del self._waiting[place.name]
