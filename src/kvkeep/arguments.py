"""Errors for unknown keyword arguments, which suggest the closest name."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import ParamSpec, TypeVar

from kvkeep.errors import ArgumentError

P = ParamSpec("P")
R = TypeVar("R")


def suggests(
    *others: Callable[..., object],
    options: type | None = None,
    now: Mapping[str, str] | None = None,
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorates a function: an unknown keyword argument raises `ArgumentError`.

    Args:
        others: functions and classes whose arguments the error may also suggest.
        options: the TypedDict of the function's other keyword arguments.
        now: arguments of earlier versions -> what replaces them.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        given = inspect.signature(function).parameters.values()
        own = {one.name: "" for one in given if one.kind is not one.VAR_KEYWORD}
        own |= dict.fromkeys(options.__annotations__ if options else (), "")
        name = function.__qualname__.removesuffix(".__init__")

        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            for given in kwargs.keys() - own.keys():
                raise ArgumentError(f"{name}() has no argument {given!r}; {hint(given)}")
            return function(*args, **kwargs)

        def hint(given: str) -> str:
            if now and given in now:
                return f"it is now {now[given]}"
            homes = dict(own)
            for other in others:
                place = f"{other.__module__.rpartition('.')[0]}.{other.__qualname__}"
                for one in inspect.signature(other).parameters:
                    homes.setdefault(one, f" of {place}()")
            for close in difflib.get_close_matches(given, homes, n=1):
                return f"did you mean {close!r}{homes[close]}?"
            return f"there is {', '.join(one for one in own if one != 'self')}"

        return checked

    return decorate
