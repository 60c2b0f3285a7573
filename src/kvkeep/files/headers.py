"""Headers of files: untrusted JSON with a checksum."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import torch
import xxhash

DTYPES = {str(t): t for t in (torch.float32, torch.float16, torch.bfloat16, torch.float64)}
"""Dtypes that keys and values may have, by their names in headers."""

_CHECKSUM = "kvkeep_checksum"


def sealed(name: str, header: Mapping[str, Any]) -> dict[str, str]:
    """A header and its checksum, as metadata for a file."""
    text = json.dumps(header)
    return {name: text, _CHECKSUM: xxhash.xxh3_128_hexdigest(text.encode())}


def require_seal(name: str, metadata: Mapping[str, str]) -> None:
    """Raise ValueError if a header does not match the checksum written by `sealed`."""
    if metadata.get(_CHECKSUM) != xxhash.xxh3_128_hexdigest(metadata.get(name, "").encode()):
        raise ValueError("the checksum of its header does not match")


Described = TypeVar("Described")


def typed(kind: type[Described], fields: dict[str, Any]) -> Described:
    """Build a header from fields of the declared types; fields with defaults are optional."""
    inner: tuple[Any, ...]
    if not isinstance(fields, dict):
        raise TypeError(f"{str(fields)[:50]!r} is not a {kind.__name__}")
    for name, declared in get_type_hints(kind).items():
        if name not in fields and hasattr(kind, name):
            continue
        value, inner = fields[name], get_args(declared)
        outer: Any = get_origin(declared) or declared
        fits = isinstance(value, inner if outer is UnionType else outer)
        if not fits or isinstance(value, bool) > (bool in (declared, *inner)):
            raise TypeError(f"{name} is {value!r:.50}, not {declared}")
        items = value.values() if outer is dict else value if outer is list else ()
        if not all(isinstance(item, inner[-1]) for item in items):
            raise TypeError(f"{name} holds values other than {inner[-1].__name__}")
        if any(isinstance(item, str) and not _is_unicode(item) for item in (value, *items)):
            raise TypeError(f"{name} holds half of a surrogate pair, which UTF-8 cannot encode")
    return kind(**fields)


def _is_unicode(text: str) -> bool:
    """Whether a string can be encoded as UTF-8: JSON may contain half of a surrogate pair."""
    return not any("\ud800" <= character <= "\udfff" for character in text)
