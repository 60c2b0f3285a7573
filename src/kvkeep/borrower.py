"""Borrower: a user of a cache's layers, such as the steps of a CUDA graph."""

from __future__ import annotations

from typing import Protocol


class Borrower(Protocol):
    """Uses the layers of a cache exclusively."""

    @property
    def fed(self) -> int:
        """Columns fed so far, padding included."""

    def give_back(self) -> None:
        """Bring the layers up to date and stop using them, or raise StateError."""
