"""Files that are written as a whole or not at all."""

from __future__ import annotations

import fcntl
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path

PARTIAL = ".kvkeep-partial"
"""How the name of what is not whole yet ends."""

_WRITTEN_AT_ONCE = 1 << 20  # Linux may stall for a second over larger writes to new files


@contextmanager
def whole_file(path: Path, *, sync: bool) -> Iterator[FileIO]:
    """A file beside `path`, renamed to it at the end, so that nobody ever sees half of it there.
    Who may read it is as before.

    Args:
        sync: wait until the disk has it, before and after it is renamed.

    Raises:
        OSError: it cannot be written; what was at `path` is as it was.
    """
    _sweep(path.parent)
    handle, partial = _new_partial(path.parent)
    try:
        with FileIO(handle, "wb") as file:
            yield file
            if path.exists():
                os.fchmod(handle, path.stat().st_mode & 0o777)
            if sync:
                os.fsync(handle)
            partial.replace(path)  # while it is locked, or it would be taken for an abandoned one
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    if sync:
        sync_to_disk(path.parent)


def write_all(descriptor: int, data: bytes | memoryview[int]) -> None:
    """Write all of some bytes; `os.write` may write fewer than it is given."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view[:_WRITTEN_AT_ONCE]) :]


def sync_to_disk(path: Path) -> None:
    """Wait until the disk has a file, or what a directory lists."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _new_partial(directory: Path) -> tuple[int, Path]:
    """A new file, open and locked, as long as it is written."""
    while True:
        path = directory / f".{uuid.uuid4().hex}{PARTIAL}"
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        if _locked(handle) and path.exists():
            return handle, path
        os.close(handle)  # taken for an abandoned one before it was locked


def _sweep(directory: Path) -> None:
    """Remove what killed processes left half-written: what nobody has locked."""
    for partial in directory.glob(f".*{PARTIAL}"):
        with suppress(OSError), open(partial, "rb") as file:
            if _locked(file.fileno()):
                partial.unlink()


def _locked(handle: int) -> bool:
    """Whether a file can be locked, which it then is until it is closed."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
