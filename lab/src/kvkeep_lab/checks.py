"""Checks of a caller's arguments."""

from __future__ import annotations

from collections.abc import Iterable

from kvkeep.errors import SpecError


def require_known(what: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raise SpecError for the first name that is not known.

    Args:
        what: the kind of thing named, such as "method".
    """
    for name in given:
        if name not in known:
            raise SpecError(f"no {what} {name!r}; there is {', '.join(known)}")
