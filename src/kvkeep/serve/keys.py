"""Keys: API keys that identify clients."""

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
    """The API keys are not valid, or their file cannot be read."""


@final
class Keys:
    """The API keys of a server, each with the name of its tenant.

    Args:
        names: each key's name. Keys with the same name belong to one tenant, which has its own
            namespace in the store and its own queue.

    Attributes:
        tenants: number of different names.

    Raises:
        KeysError: there is no key, a key is empty or not printable ASCII without spaces, or a name
            is not valid.
    """

    def __init__(self, names: Mapping[str, str]) -> None:
        if not names:
            raise KeysError("no API keys; give at least one")
        for key, name in names.items():
            if not key or not key.isascii() or not key.isprintable() or " " in key:
                whose = f"the API key of {name or 'this server'}"
                raise KeysError(
                    f"{whose} is empty, or not printable ASCII without spaces; use another"
                )
            if name and not _NAME.fullmatch(name):
                raise KeysError(f"key name {name!r}; use letters, digits, '.', '_' and '-'")
        self.tenants = len(set(names.values()))
        self._names = [(_digest(key.encode()), name) for key, name in names.items()]

    @classmethod
    def single(cls, key: str) -> Keys:
        """Keys with a single key for all clients; surrounding white space is removed."""
        return cls({key.strip(): ""})

    @classmethod
    def read(cls, path: str | Path) -> Keys:
        """Read keys from a file with one line `name:key` per key. Empty lines and lines that start
        with # are ignored.

        Raises:
            KeysError: the file cannot be read, has no key, a malformed line, or a repeated key.
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
        """The name of a key; None for an unknown key. The comparison takes constant time."""
        digest = _digest(given)
        found = [name for known, name in self._names if hmac.compare_digest(known, digest)]
        return found[0] if found else None


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
