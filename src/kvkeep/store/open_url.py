"""Places: the backend that a path or a URL names."""

from __future__ import annotations

import os
import re
from typing import Any
from urllib.parse import parse_qsl, urlencode

from kvkeep.errors import SpecError, StateError
from kvkeep.store.backend import Backend
from kvkeep.store.disk import Disk
from kvkeep.store.lmcache import SCHEME, LMCache
from kvkeep.store.location import Location, protocols
from kvkeep.store.redis import SCHEMES, Redis


def opened(
    where: str | os.PathLike[str], budget: int | None = None, *, create: bool = True, **options: Any
) -> Backend:
    """The backend that a path or a URL names: a directory (`Disk`), a Redis or Valkey server
    (`Redis`), a server of LMCache (`LMCache`), or any other place that fsspec knows (`Location`).
    Names of stores in a server may be in the URL, as in `redis://host/0?name=chats`.

    Args:
        budget: most bytes of all blocks; None: as many as come.
        create: False refuses a place where no store was before.
        options: of that backend.

    Raises:
        SpecError: what is named cannot be a store, or keeps no budget, or none is there.
        StateError: `create=False`, and nobody answers.
    """
    text = os.fspath(where)
    scheme, separator, _ = text.partition("://")
    scheme = scheme.partition("::")[0] if separator or "::" in scheme else ""
    if not scheme:
        if not create and not os.path.isdir(os.path.join(text, "blocks")):
            raise _no_store(text)
        return Disk(text, budget, **options)
    servers = [*SCHEMES, SCHEME]
    if scheme not in servers and scheme not in protocols():
        raise SpecError(
            f"stores of {scheme!r} are not known; give a directory, {', '.join(servers)}, or a URL "
            "of fsspec, such as s3://, gs://, az://, hf:// or file://"
        )
    url = text
    if scheme in servers:
        address, _, query = text.partition("?")
        asked = dict(parse_qsl(query))
        if "name" in asked:
            options = {"name": asked.pop("name")} | options
        url = f"{address}?{urlencode(asked)}"
    backend: Backend
    if scheme in SCHEMES:
        backend = Redis(url, budget, **options)
    elif scheme == SCHEME:
        if budget is not None:
            raise SpecError(
                f"a budget of {budget} bytes, but LMCache's server keeps none; call gc(budget=...)"
            )
        backend = LMCache(url, **options)
    else:
        backend = Location(url, budget, **options)
    if not create and not backend.exists():
        if backend.failures:
            raise StateError(
                f"{shown(text)} does not answer: {backend.last_error}; see that it runs, and where"
            )
        raise _no_store(text)
    return backend


def shown(where: str) -> str:
    """A path or a URL without what it says of users and passwords."""
    return re.sub(r"(?<=://)[^/]*@", "", where)


def _no_store(where: str) -> SpecError:
    return SpecError(
        f"there is no store at {shown(where)}; see whether that is the right place, or put "
        "something there first, with kvkeep.PrefixStore(backend=...)"
    )
