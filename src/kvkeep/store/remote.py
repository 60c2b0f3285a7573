"""Remote: the base of backends over a network, which may be unavailable."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from kvkeep.store.backend import Backend

REST_S = 5.0
"""Seconds after a failure during which the remote side is not called."""

Answer = TypeVar("Answer")


class Remote(Backend):
    """A backend over a network. After a failure, calls return a miss for five seconds, so that an
    unavailable server costs one timeout, not one per block."""

    def __init__(self) -> None:
        self._paused_until = 0.0

    @property
    def resting(self) -> bool:
        """Whether calls return a miss at the moment, because one failed shortly before."""
        return time.monotonic() < self._paused_until

    def _asked(self, ask: Callable[[], Answer], otherwise: Answer) -> Answer:
        """Return `ask()`, or `otherwise` if it fails or the backend is resting."""
        if self.resting:
            return otherwise
        try:
            return ask()
        except FileNotFoundError:
            return otherwise
        except Exception as error:  # client libraries may raise any exception
            self._failed(error)
            if self._is_unavailable(error):
                self._paused_until = time.monotonic() + REST_S
            return otherwise

    def _is_unavailable(self, error: Exception) -> bool:
        """Whether an error means that the next calls would fail too."""
        return True
