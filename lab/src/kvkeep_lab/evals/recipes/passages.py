"""Texts of many passages."""

from __future__ import annotations

from collections.abc import Sequence


def placed(one: str, others: Sequence[str], depth: int) -> tuple[list[str], int]:
    """The others with one more among them, at a depth in percent, and its index."""
    index = len(others) * depth // 100
    return [*others[:index], one, *others[index:]], index


def numbered(kind: str, passages: Sequence[str]) -> str:
    """Passages as *Kind 1: ...*, each on a line."""
    return "\n".join(f"{kind} {number}: {text}" for number, text in enumerate(passages, 1))
