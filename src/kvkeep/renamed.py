"""Errors for names of earlier versions, which give the new names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn


class Renamed:
    """Placeholder for a renamed member of a class: reading or setting it raises an error with the
    new name.

    Args:
        now: the new name.
    """

    def __init__(self, now: str) -> None:
        self.now = now

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, instance: Any, owner: type) -> NoReturn:
        raise AttributeError(f"{owner.__name__}.{self.name} is now {self.now}; use that name")

    def __set__(self, instance: Any, value: Any) -> NoReturn:
        self.__get__(instance, type(instance))


def require_new_names(kind: type) -> None:
    """Raise TypeError if a new class overrides a renamed member of a base under its former name."""
    for base in kind.__mro__[1:]:
        for name, member in vars(base).items():
            if isinstance(member, Renamed) and name in vars(kind):
                raise TypeError(f"class {kind.__name__}: {name} is now {member.now}; rename it")


def refuse_name(package: str, name: str, now: Mapping[str, str]) -> NoReturn:
    """Raise the error of a package's `__getattr__` for an unknown name.

    Args:
        now: names of earlier versions -> their present full names.

    Raises:
        ImportError: a name of an earlier version. An import statement would hide the text of an
            AttributeError.
        AttributeError: any other name.
    """
    if name in now:
        raise ImportError(f"{package}.{name} is now {now[name]}", name=package)
    raise AttributeError(f"module {package!r} has no attribute {name!r}")
