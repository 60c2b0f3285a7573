"""A backend that answers only while it is let."""

from __future__ import annotations

from threading import Event

from kvkeep.store.backend import Backend
from kvkeep.store.memory import Memory


class Held(Backend):
    """A backend in memory whose calls wait while they are held: those that read while `reads` is
    cleared, those that write while `writes` is."""

    name = "held"

    def __init__(self) -> None:
        self.held = Memory()
        self.reads, self.writes, self.asked = Event(), Event(), Event()
        self.let()

    def let(self) -> None:
        self.reads.set()
        self.writes.set()

    def get(self, key, *, used=True):
        self._wait(self.reads)
        return self.held.get(key, used=used)

    def put(self, block):
        self._wait(self.writes)
        return self.held.put(block)

    def contains(self, key):
        self._wait(self.writes)
        return self.held.contains(key)

    def delete(self, key):
        self._wait(self.writes)
        self.held.delete(key)

    def scan(self, prefix=""):
        self._wait(self.reads)
        return self.held.scan(prefix)

    def _wait(self, event: Event) -> None:
        self.asked.set()
        assert event.wait(120)
