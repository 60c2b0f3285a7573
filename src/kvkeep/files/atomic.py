"""Files that are written as a whole or not at all, and read whatever lies in their place."""

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
"""How the name of what is not whole yet ends."""

PRIVATE, PRIVATE_DIRECTORY = 0o600, 0o700
"""The modes of what only its owner may see."""

_WRITTEN_AT_ONCE = 1 << 20  # Linux may stall for a second over larger writes to new files


class NoFileError(OSError):
    """Something else than a file lies in its place: a link, a directory, a FIFO."""


class CutShortError(ValueError):
    """A file ended before the bytes that it was to have."""


@contextmanager
def whole_file(path: Path, *, sync: bool, private: bool = False) -> Iterator[FileIO]:
    """A file beside `path`, renamed to it at the end, so that nobody ever sees half of it there.
    A file that is replaced keeps its mode, also while the new one is being written.

    Args:
        sync: wait until the disk has it, before and after it is renamed.
        private: only its owner may read a new file; otherwise the umask says who may.

    Raises:
        OSError: it cannot be written; what was at `path` is as it was.
    """
    _sweep(path.parent)
    handle, partial = _new_partial(path, private)
    try:
        with FileIO(handle, "wb") as file:
            yield file
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


@contextmanager
def opened(path: Path, *, follow: bool = True) -> Iterator[int]:
    """Open a regular file for reading; returns its descriptor. Anything else, such as a FIFO
    without a writer, is refused at once.

    Args:
        follow: whether the file may be a symbolic link to another.

    Raises:
        OSError: it cannot be opened.
        NoFileError: something else lies there.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    try:
        handle = os.open(path, flags)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise NoFileError(error.errno, "it is no regular file", str(path)) from error
        raise
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise NoFileError(errno.EINVAL, "it is no regular file", str(path))
        yield handle
    finally:
        os.close(handle)


def read_into(handle: int, data: bytearray | memoryview[int], offset: int) -> None:
    """Fill a buffer from some place of a file.

    Raises:
        CutShortError: the file ends before.
        OSError: it cannot be read.
    """
    view = memoryview(data)
    while view:
        count = os.preadv(handle, [view[: 1 << 30]], offset)
        if not count:
            raise CutShortError(f"it ends at {offset}, {len(view)} bytes too early")
        view, offset = view[count:], offset + count


def _new_partial(path: Path, private: bool) -> tuple[int, Path]:
    """A new file beside a path, with the mode of what lies there; open and locked, as long as it is
    written."""
    before = None
    with suppress(FileNotFoundError):
        before = stat.S_IMODE(path.stat().st_mode) & 0o777
    while True:
        partial = path.parent / f".{uuid.uuid4().hex}{PARTIAL}"
        mode = 0o666 if before is None and not private else PRIVATE
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        handle = os.open(partial, flags, mode)
        try:
            if before is not None:
                os.fchmod(handle, before)
            if _locked(handle) and partial.exists():
                return handle, partial
        except BaseException:
            os.close(handle)
            partial.unlink(missing_ok=True)
            raise
        os.close(handle)  # taken for an abandoned one before it was locked


def _sweep(directory: Path) -> None:
    """Remove what killed processes left half-written: what nobody has locked."""
    for partial in directory.glob(f".*{PARTIAL}"):
        with suppress(OSError), opened(partial, follow=False) as handle:
            if _locked(handle):
                partial.unlink()


def _locked(handle: int) -> bool:
    """Whether a file can be locked, which it then is until it is closed."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
