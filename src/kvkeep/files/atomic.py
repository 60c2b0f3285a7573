"""Atomic writing of files."""

from __future__ import annotations

import fcntl
import os
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path

from kvkeep.reading import open_file

PARTIAL = ".kvkeep-partial"
"""Suffix of files that are still being written."""

PRIVATE, PRIVATE_DIRECTORY = 0o600, 0o700
"""Modes of files and directories that only their owner may read."""

_WRITTEN_AT_ONCE = 1 << 20  # Linux may stall for a second on larger writes to new files


@contextmanager
def whole_file(
    path: Path, *, sync: bool, private: bool = False, partial: Path | None = None
) -> Iterator[FileIO]:
    """A context for writing a file: yields a temporary file and renames it to `path` at the end, so
    that readers never see a partial file. The temporary file has the mode of the file that it
    replaces.

    Args:
        sync: flush to disk (fsync) before and after the file is renamed.
        private: only the owner may read a new file; otherwise the umask applies.
        partial: directory of the temporary file, in the same filesystem; None: that of `path`.

    Raises:
        OSError: the file cannot be written; the file at `path` is unchanged.
    """
    partial = partial or path.parent
    _sweep(partial)
    with _new_partial(path, partial, private) as file:
        new = Path(file.name)
        try:
            yield file
            if sync:
                os.fsync(file.fileno())
            new.replace(path)  # still locked, so that no sweep removes it as abandoned
        except BaseException:
            new.unlink(missing_ok=True)
            raise
    if sync:
        sync_to_disk(path.parent)


def write_all(descriptor: int, data: bytes | memoryview[int]) -> None:
    """Write all bytes; a single `os.write` may write fewer."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view[:_WRITTEN_AT_ONCE]) :]


def sync_to_disk(path: Path) -> None:
    """Flush a file, or the entries of a directory, to disk (fsync)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _new_partial(path: Path, directory: Path, private: bool) -> FileIO:
    """A new temporary file in a directory, open and locked, with the mode of the file at `path`."""
    before = None
    with suppress(FileNotFoundError):
        before = stat.S_IMODE(path.stat().st_mode) & 0o777
    mode = 0o666 if before is None and not private else PRIVATE
    while True:
        partial = directory / f".{uuid.uuid4().hex}{PARTIAL}"
        try:
            file = FileIO(partial, "xb", opener=lambda path, flags: os.open(path, flags, mode))
            if before is not None:
                os.fchmod(file.fileno(), before)
            if _locked(file.fileno()) and partial.exists():
                return file
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        file.close()  # another process swept it as abandoned before it was locked


def _sweep(directory: Path) -> None:
    """Remove partial files left behind by killed processes, which are the unlocked ones."""
    for partial in directory.glob(f".*{PARTIAL}"):
        with suppress(OSError), open_file(partial, follow=False) as handle:
            if _locked(handle):
                partial.unlink()


def _locked(handle: int) -> bool:
    """Try to lock a file until it is closed; return whether it was locked."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
