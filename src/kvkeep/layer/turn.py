"""Turn: a lock that refuses a second thread."""

from __future__ import annotations

from threading import RLock
from types import TracebackType
from typing import Any

from kvkeep.errors import StateError

_TAKEN = (
    "another thread is changing this cache: a cache serves one thread at a time; give each thread "
    "its own cache, such as a fork, or guard the cache with a lock"
)


class Turn:
    """A reentrant lock, held during a change. It never blocks: a second thread gets a StateError.

    Copies are unlocked.

    Attributes:
        entries: number of times it was taken. If the number is the same, nothing has changed.
    """

    def __init__(self) -> None:
        self._lock = RLock()
        self.entries = 0

    def __enter__(self) -> None:
        if not self._lock.acquire(False):
            raise StateError(_TAKEN)
        self.entries += 1

    def continue_from(self, entries: int) -> None:
        """Take the turn if it has been taken exactly `entries` times, that is, not since."""
        with self:
            if self.entries != entries + 1:
                raise StateError(_TAKEN)
            self._lock.acquire()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._lock.release()

    def __deepcopy__(self, memo: dict[int, Any]) -> Turn:
        return Turn()

    def __reduce__(self) -> tuple[type[Turn], tuple[()]]:
        return Turn, ()
