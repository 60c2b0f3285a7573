"""Keys: who a client is, by the API key that it sends."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping
from pathlib import Path
from typing import final

from kvkeep.errors import KVKeepError

_NAME = re.compile(r"[A-Za-z0-9_.-]+")


class KeysError(KVKeepError, ValueError):
    """API keys that no client could send, or a file of them that cannot be read."""


@final
class Keys:
    """The API keys of a server, each with the name of whom it belongs to.

    Args:
        names: the name of each key. Keys with the same name belong to one tenant, which has a
            namespace of the store and a queue of its own.

    Raises:
        KeysError: no key, one that is empty or not printable ASCII without spaces, or a bad name.
    """

    def __init__(self, names: Mapping[str, str]) -> None:
        if not names:
            raise KeysError("no API keys; give at least one")
        for key, name in names.items():
            if not key or not key.isascii() or not key.isprintable() or " " in key:
                raise KeysError(
                    f"the API key of {name or 'this server'} is empty, or has characters that no "
                    "client can send; use printable ASCII without spaces"
                )
            if name and not _NAME.fullmatch(name):
                raise KeysError(f"a key's name {name!r}; use letters, digits, '.', '_' and '-'")
        self._names = [(_digest(key.encode()), name) for key, name in names.items()]

    @classmethod
    def single(cls, key: str) -> Keys:
        """One key for all clients; white space around it does not count."""
        return cls({key.strip(): ""})

    @classmethod
    def read(cls, path: str | Path) -> Keys:
        """The keys of a file: a line `name:key` for each; empty lines and those that begin with #
        do not count.

        Raises:
            KeysError: it cannot be read, has no key, a malformed line, or one key twice.
        """
        try:
            lines = Path(path).read_text("utf-8").splitlines()
        except (OSError, ValueError) as error:
            raise KeysError(f"cannot read keys from {path}: {error}") from error
        names: dict[str, str] = {}
        for number, line in enumerate(lines, 1):
            if not line.strip() or line.lstrip().startswith("#"):
                continue
            name, colon, key = (part.strip() for part in line.partition(":"))
            if not colon or not name:
                raise KeysError(f"line {number} of {path} is not `name:key`")
            if key in names:
                raise KeysError(f"line {number} of {path} repeats a key; give each client its own")
            names[key] = name
        return cls(names)

    def name(self, given: bytes) -> str | None:
        """The name of a key; None: unknown. The time it takes does not depend on the keys."""
        digest, found = _digest(given), None
        for known, name in self._names:
            if hmac.compare_digest(known, digest):
                found = name
        return found


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
