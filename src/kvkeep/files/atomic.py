"""Atomic writing of files, and reading that tolerates anything at the path."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path

PARTIAL = ".kvkeep-partial"
"""The suffix of files that are still being written."""

PRIVATE, PRIVATE_DIRECTORY = 0o600, 0o700
"""The modes of files and directories that only their owner may read."""

_WRITTEN_AT_ONCE = 1 << 20  # Linux may stall for a second over larger writes to new files


class NoFileError(OSError):
    """The path is not a regular file, but a link, a directory or a FIFO."""


class CutShortError(ValueError):
    """A file is shorter than expected."""


@contextmanager
def whole_file(path: Path, *, sync: bool, private: bool = False) -> Iterator[FileIO]:
    """A temporary file in the directory of `path`, renamed to `path` at the end, so that readers
    never see a partial file. It has the mode of the file it replaces from the start.

    Args:
        sync: flush to disk (fsync) before and after the file is renamed.
        private: only the owner may read a new file; otherwise the umask applies.

    Raises:
        OSError: it cannot be written; the file at `path` is unchanged.
    """
    _sweep(path.parent)
    with _new_partial(path, private) as file:
        partial = Path(file.name)
        try:
            yield file
            if sync:
                os.fsync(file.fileno())
            partial.replace(path)  # still locked, so that it is not removed as abandoned
        except BaseException:
            partial.unlink(missing_ok=True)
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


@contextmanager
def opened(path: Path, *, follow: bool = True) -> Iterator[int]:
    """Open a regular file for reading; returns its descriptor. Anything else is refused without
    blocking, such as a FIFO without a writer.

    Args:
        follow: whether the path may be a symbolic link.

    Raises:
        OSError: it cannot be opened.
        NoFileError: it is not a regular file.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    try:
        file = FileIO(path, opener=lambda path, _: os.open(path, flags))
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
            raise NoFileError(error.errno, "it is not a regular file", str(path)) from error
        raise
    with file:  # an object closes its descriptor wherever an interrupt ends this
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise NoFileError(errno.EINVAL, "it is not a regular file", str(path))
        yield file.fileno()


def read_into(handle: int, data: bytearray | memoryview[int], offset: int) -> None:
    """Fill a buffer with the bytes of a file from `offset` on.

    Raises:
        CutShortError: the file ends too early.
        OSError: it cannot be read.
    """
    view = memoryview(data)
    while view:
        count = os.preadv(handle, [view[: 1 << 30]], offset)
        if not count:
            raise CutShortError(f"it ends at {offset}, {len(view)} bytes too early")
        view, offset = view[count:], offset + count


def _new_partial(path: Path, private: bool) -> FileIO:
    """A new temporary file in the directory of `path`, with the mode of the file there; open, and
    locked while it is being written."""
    before = None
    with suppress(FileNotFoundError):
        before = stat.S_IMODE(path.stat().st_mode) & 0o777
    mode = 0o666 if before is None and not private else PRIVATE
    while True:
        partial = path.parent / f".{uuid.uuid4().hex}{PARTIAL}"
        try:
            file = FileIO(partial, "xb", opener=lambda path, flags: os.open(path, flags, mode))
            if before is not None:
                os.fchmod(file.fileno(), before)
            if _locked(file.fileno()) and partial.exists():
                return file
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        file.close()  # another process removed it as abandoned before it was locked


def _sweep(directory: Path) -> None:
    """Remove partial files that killed processes left behind: those that are not locked."""
    for partial in directory.glob(f".*{PARTIAL}"):
        with suppress(OSError), opened(partial, follow=False) as handle:
            if _locked(handle):
                partial.unlink()


def _locked(handle: int) -> bool:
    """Try to lock a file until it is closed; returns whether that succeeded."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
