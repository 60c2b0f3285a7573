"""Reads and checks the notes in a session's file, which are untrusted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvkeep.errors import SavedCacheError
from kvkeep.files.cache_header import Header

Message = dict[str, str]


def messages_in(header: Header, path: Path) -> list[Message]:
    """The messages of a conversation.

    Raises:
        SavedCacheError: the file's notes do not contain a list of messages.
    """
    said = _list_in(header, "messages", path)
    for message in said:
        if not isinstance(message, dict) or message.keys() != {"role", "content"}:
            raise SavedCacheError(f"{path}: {str(message)[:80]} is not a message of a session")
        if not all(isinstance(text, str) for text in message.values()):
            raise SavedCacheError(f"{path}: {str(message)[:80]} is a message without text")
    return said


def _list_in(header: Header, name: str, path: Path) -> list[Any]:
    """Parse a list from the notes of a file."""
    try:
        found = json.loads(header.notes.get(name, "[]"))
    except (ValueError, RecursionError) as error:
        raise SavedCacheError(f"{path}: its {name} are not JSON: {error}") from error
    if not isinstance(found, list):
        raise SavedCacheError(f"{path}: its {name} are not a list")
    return found


def marks_in(header: Header, path: Path, columns: int, ids: int) -> list[tuple[int, int]]:
    """The starts of turns, each as (columns fed, number of token ids) before the turn.

    Raises:
        SavedCacheError: a start exceeds `columns` or `ids`, the file's totals, or is malformed.
    """
    found: list[tuple[int, int]] = []
    for mark in _list_in(header, "marks", path):
        numbers: list[Any] = mark if isinstance(mark, list) else []
        if (
            len(numbers) != 2
            or not all(type(number) is int for number in numbers)
            or not (0 <= numbers[0] <= columns and 0 <= numbers[1] <= ids)
        ):
            raise SavedCacheError(
                f"{path}: a turn starts at {str(mark)[:40]}, but there are {columns} columns and "
                f"{ids} tokens"
            )
        found.append((numbers[0], numbers[1]))
    return found
