"""What a session's file notes beside its cache, which may say anything."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvkeep.errors import SavedCacheError
from kvkeep.files.cache_header import Header

Message = dict[str, str]


def messages_in(header: Header, path: Path) -> list[Message]:
    """What was said, as a file says.

    Raises:
        SavedCacheError: that is no list of messages.
    """
    said = _noted(header, "messages", path)
    for message in said:
        if not isinstance(message, dict) or message.keys() != {"role", "content"}:
            raise SavedCacheError(f"{path}: {str(message)[:80]} is no message of a session")
        if not all(isinstance(text, str) for text in message.values()):
            raise SavedCacheError(f"{path}: {str(message)[:80]} is no text")
    return said


def _noted(header: Header, name: str, path: Path) -> list[Any]:
    """A list in the notes of a file."""
    try:
        found = json.loads(header.notes.get(name, "[]"))
    except (ValueError, RecursionError) as error:
        raise SavedCacheError(f"{path}: its {name} are no JSON: {error}") from error
    if not isinstance(found, list):
        raise SavedCacheError(f"{path}: its {name} are no list")
    return found


def marks_in(header: Header, path: Path, columns: int, ids: int) -> list[tuple[int, int]]:
    """Where turns began: columns fed and ids known, as a file says.

    Raises:
        SavedCacheError: that is beyond the `columns` that were fed, or the `ids`.
    """
    found: list[tuple[int, int]] = []
    for mark in _noted(header, "marks", path):
        numbers: list[Any] = mark if isinstance(mark, list) else []
        if (
            len(numbers) != 2
            or not all(type(number) is int for number in numbers)
            or not (0 <= numbers[0] <= columns and 0 <= numbers[1] <= ids)
        ):
            raise SavedCacheError(
                f"{path}: a turn at {str(mark)[:40]} of {columns} columns, {ids} tokens"
            )
        found.append((numbers[0], numbers[1]))
    return found
