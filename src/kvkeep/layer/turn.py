"""Turn: a lock that refuses a second thread."""

from __future__ import annotations

from threading import RLock
from types import TracebackType
from typing import Any

from kvkeep.errors import StateError


class Turn:
    """A reentrant lock, held during a change. It never blocks: a second thread gets a StateError.

    Copies are unlocked.

    Attributes:
        entries: how often it was taken. Where this is the same, nothing has changed.
    """

    def __init__(self) -> None:
        self._lock = RLock()
        self.entries = 0

    def __enter__(self) -> None:
        if self._lock.acquire(False):
            self.entries += 1
        else:
            raise StateError(
                "another thread is changing this cache: a cache serves one thread at a time; give "
                "each thread its own cache, such as a fork, or guard the cache with a lock"
            )

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
