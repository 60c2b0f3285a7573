"""Compiled steps on disk. Later processes find them by a key of the model and by the inputs."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from stat import S_IWGRP, S_IWOTH
from time import time
from typing import Any

from kvkeep.errors import MissingPackageError
from kvkeep.files.atomic import PRIVATE_DIRECTORY, whole_file, write_all
from kvkeep.home import home

_MOST = 64  # most programs that are kept: the most recently used
_UNUSED = 90 * 86400  # seconds without use after which other files are removed


def directory() -> Path | None:
    """The directory for compiled steps: $KVKEEP_STEPS, or `steps` in kvkeep's own directory. None:
    the variable is empty, the directory cannot be written, or other users can write to it."""
    chosen = os.environ.get("KVKEEP_STEPS")
    if chosen == "":
        return None
    with suppress(MissingPackageError, OSError):
        found = Path(chosen) if chosen else home() / "steps"
        found.mkdir(parents=True, exist_ok=True, mode=PRIVATE_DIRECTORY)
        return found if os.access(found, os.W_OK) and _is_private(found) else None
    return None


def _is_private(place: Path) -> bool:
    """Whether only this user can write to a directory, because code in it is run."""
    if os.name != "posix":
        return True
    about = place.stat()
    return about.st_uid == os.getuid() and not about.st_mode & (S_IWGRP | S_IWOTH)


def keep(program: bytes, name: str, description: Mapping[str, Any]) -> None:
    """Save a compiled step for later processes, if there is a directory with enough space.

    Args:
        program: the contents of its file.
        name: see `name_of`.
        description: values that `find` returns with the file, as JSON types.
    """
    place = directory()
    if place is None:
        return
    described = {"sha256": hashlib.sha256(program).hexdigest(), **description}
    file, about = place / f"{name}.pt2", place / f"{name}.json"
    try:
        with whole_file(file, sync=False, private=True) as out:
            write_all(out.fileno(), program)
        with whole_file(about, sync=False, private=True) as out:
            write_all(out.fileno(), json.dumps(described).encode())
        _prune(place)
    except OSError:
        if not about.exists():
            file.unlink(missing_ok=True)


def name_of(key: str, inputs: Sequence[str], rows: int) -> str:
    """The name of a compiled step.

    Args:
        key: the model's key, see `ModelState.key`.
        inputs: the names of the step's arguments.
        rows: the number of rows of the arguments.
    """
    return f"{key}-{'-'.join(inputs)}-{rows}"


def files_of(key: str) -> list[Path]:
    """The programs of a model, by its key."""
    place = directory()
    found = [] if place is None else sorted(place.glob(f"{key}-*.pt2"))
    return [file for file in found if file.with_suffix(".json").exists()]


def find(name: str) -> tuple[Path, dict[str, Any]] | None:
    """The file of a compiled step and its description; None: it does not exist or is damaged."""
    place = directory()
    if place is None:
        return None
    file, about = place / f"{name}.pt2", place / f"{name}.json"
    try:
        described = json.loads(about.read_text())
        if described.pop("sha256") != _digest(file):
            return None
        about.touch()
    except (OSError, ValueError, KeyError, AttributeError):
        return None
    return file, described


def used(key: str) -> int:
    """The tokens that `note_use` has counted for a model; -1: its steps cannot be compiled."""
    place = directory()
    try:
        return 0 if place is None else int((place / f"{key}.tokens").read_text())
    except (OSError, ValueError):
        return 0


def note_use(key: str, tokens: int) -> None:
    """Count tokens that a model has generated; -1: record that its steps cannot be compiled."""
    place, before = directory(), used(key)
    if place is not None and before >= 0:
        total = before + tokens if tokens >= 0 else tokens
        with suppress(OSError), whole_file(place / f"{key}.tokens", sync=False) as out:
            write_all(out.fileno(), str(total).encode())


def _digest(file: Path) -> str:
    with file.open("rb") as data:
        return hashlib.file_digest(data, "sha256").hexdigest()


def _prune(place: Path) -> None:
    found = sorted(place.glob("*.json"), key=lambda x: x.stat().st_mtime, reverse=True)
    for about in found[_MOST:]:
        about.unlink(missing_ok=True)
        about.with_suffix(".pt2").unlink(missing_ok=True)
    kept = {about.stem for about in found[:_MOST]}
    for file in (*place.glob("*.pt2"), *place.glob("*.tokens")):  # e.g. of killed processes
        if file.stem not in kept and file.stat().st_mtime < time() - _UNUSED:
            file.unlink(missing_ok=True)
