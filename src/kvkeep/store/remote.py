"""Remote: what stores that are elsewhere have in common: they may be away."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from kvkeep.store.backend import Backend

REST_S = 5.0
"""For so long nothing is asked of who did not answer."""

Answer = TypeVar("Answer")


class Remote(Backend):
    """A backend behind a network. Who does not answer is left alone for some seconds, in which all
    is a miss, so that a server that is dead costs one timeout and not one for every block."""

    def __init__(self) -> None:
        self._rests_until = 0.0

    @property
    def resting(self) -> bool:
        """Whether nothing is asked at the moment."""
        return time.monotonic() < self._rests_until

    def _asked(self, ask: Callable[[], Answer], otherwise: Answer) -> Answer:
        """What asking gives, or `otherwise` where that fails, or while this rests."""
        if self.resting:
            return otherwise
        try:
            return ask()
        except FileNotFoundError:
            return otherwise
        except Exception as error:  # of libraries that may raise anything
            self._failed(error)
            if self._is_away(error):
                self._rests_until = time.monotonic() + REST_S
            return otherwise

    def _is_away(self, error: Exception) -> bool:
        """Whether who failed so will fail at the next call too."""
        return True
