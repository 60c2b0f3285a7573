"""Context variables that are set within a `with` block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

Value = TypeVar("Value")


@contextmanager
def within(variable: ContextVar[Value], value: Value) -> Iterator[None]:
    """A context in which a variable has a value. Tasks and threads started in it inherit that."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)
