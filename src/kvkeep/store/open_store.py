"""Open the backend that a path or a URL names."""

from __future__ import annotations

import os
import re
from typing import Any
from urllib.parse import parse_qsl, urlencode

from kvkeep.errors import SpecError, StateError
from kvkeep.store.backend import Backend
from kvkeep.store.disk import Disk
from kvkeep.store.location import Location, protocols


def open_store(
    where: str | os.PathLike[str], budget: int | None = None, *, create: bool = True, **options: Any
) -> Backend:
    """Open the backend at a path or URL: a directory (`Disk`), a Redis or Valkey server (`Redis`),
    an LMCache server (`LMCache`), your own class with `Backend.schemes`, or any other location that
    fsspec supports (`Location`). The URL may name a store within a server, as in
    `redis://host/0?name=chats`.

    Args:
        budget: most bytes of all blocks; None: no limit.
        create: False: raise SpecError if no store exists at the path or URL.
        options: keyword arguments of the backend's class.

    Raises:
        SpecError: the path or URL cannot be a store, the server takes no budget, or with
            `create=False` there is no store.
        StateError: `create=False`, and the server does not answer.
    """
    text = os.fspath(where)
    scheme, separator, _ = text.partition("://")
    scheme = scheme.partition("::")[0] if separator or "::" in scheme else ""
    if budget is not None:
        options["budget"] = budget
    if not scheme:
        if not create and not os.path.isdir(os.path.join(text, "blocks")):
            raise _no_store(text)
        return Disk(text, **options)
    kind, url = Backend.by_scheme.get(scheme), text
    if kind is not None:
        address, _, query = text.partition("?")
        asked = dict(parse_qsl(query))
        if "name" in asked:
            options = {"name": asked.pop("name")} | options
        url = f"{address}?{urlencode(asked)}" if asked else address
    elif scheme not in protocols():
        raise SpecError(
            f"URL scheme {scheme!r} is unknown; give a directory, {', '.join(Backend.by_scheme)}, "
            "or a URL that fsspec supports, such as s3://, gs://, az://, hf:// or file://"
        )
    backend = (kind or Location)(url, **options)
    if not create and not backend.exists():
        if backend.failures:
            raise StateError(
                f"{shown(text)} does not answer: {backend.last_error}; check that it runs and that "
                "the address is right"
            )
        raise _no_store(text)
    return backend


def shown(where: str) -> str:
    """A path or URL without user name and password, for messages."""
    return re.sub(r"(?<=://)[^/]*@", "", where)


def _no_store(where: str) -> SpecError:
    return SpecError(
        f"there is no store at {shown(where)}; check the path or URL, or create a store there with "
        "kvkeep.PrefixStore(backend=...)"
    )
