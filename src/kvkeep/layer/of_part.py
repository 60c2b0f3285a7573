"""Members of an object's parts under names of the object."""

from __future__ import annotations

from operator import attrgetter
from typing import Any, Generic, TypeVar

Value = TypeVar("Value")


class OfPart(Generic[Value]):
    """A member of a part: it is read and set there.

    Args:
        path: the names that lead to it, such as `cursor.evicted`.
    """

    def __init__(self, path: str) -> None:
        self._part, _, self._name = path.rpartition(".")

    def __get__(self, instance: Any, owner: type) -> Value:
        value: Value = getattr(attrgetter(self._part)(instance), self._name)
        return value

    def __set__(self, instance: Any, value: Value) -> None:
        setattr(attrgetter(self._part)(instance), self._name, value)
