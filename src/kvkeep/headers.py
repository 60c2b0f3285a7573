"""Headers of files: dataclasses, read from JSON that may be anything."""

from __future__ import annotations

from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

Described = TypeVar("Described")


def typed(kind: type[Described], fields: dict[str, Any]) -> Described:
    """A header, of fields of the types it declares."""
    inner: tuple[Any, ...]
    for name, declared in get_type_hints(kind).items():
        value, inner = fields[name], get_args(declared)
        outer: Any = get_origin(declared) or declared
        found = isinstance(value, inner if outer is UnionType else outer)
        items = value.values() if outer is dict else value if outer is list else ()
        if not found or isinstance(value, bool) > (bool in (declared, *inner)):
            raise TypeError(f"{name} is {value!r:.50}, not {declared}")
        if not all(isinstance(item, inner[-1]) for item in items):
            raise TypeError(f"{name} does not hold {inner[-1].__name__}s only")
    return kind(**fields)
