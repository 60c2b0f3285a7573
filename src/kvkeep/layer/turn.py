"""Turn: one thread at a time."""

from __future__ import annotations

from threading import RLock
from types import TracebackType
from typing import Any

from kvkeep.errors import StateError


class Turn:
    """Held while something is changed. Nobody waits: a second thread is refused.

    The thread that holds it may take it again. Copies are free.
    """

    def __init__(self) -> None:
        self._lock = RLock()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise StateError(
                "another thread is changing this cache: a cache serves one thread at a time; give "
                "each a cache of its own, such as a fork, or let them take turns by a lock"
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
