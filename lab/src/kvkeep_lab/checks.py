"""Checks of what a caller asks for."""

from __future__ import annotations

from collections.abc import Iterable

from kvkeep.errors import SpecError


def require_known(what: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raise SpecError for the first name that is not known.

    Args:
        what: what the names are of, such as "method".
    """
    for name in given:
        if name not in known:
            raise SpecError(f"no {what} {name!r}; there is {', '.join(known)}")
