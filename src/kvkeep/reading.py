"""Reads regular files safely."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path


class NoFileError(OSError):
    """The path is not a regular file, but a link, a directory or a FIFO."""


class CutShortError(ValueError):
    """A file is shorter than expected."""


@contextmanager
def open_file(path: Path, *, follow: bool = True) -> Iterator[int]:
    """Open a regular file for reading; yields its descriptor. Never blocks, even if the path is a
    FIFO without a writer.

    Args:
        follow: whether the path may be a symbolic link.

    Raises:
        OSError: the file cannot be opened.
        NoFileError: the path is not a regular file.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    try:
        file = FileIO(path, opener=lambda path, _: os.open(path, flags))
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
            raise NoFileError(error.errno, "it is not a regular file", str(path)) from error
        raise
    with file:  # closes the descriptor even if an interrupt hits at any point
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise NoFileError(errno.EINVAL, "it is not a regular file", str(path))
        yield file.fileno()


def read_into(handle: int, data: bytearray | memoryview[int], offset: int) -> None:
    """Fill a buffer with a file's bytes from `offset` on.

    Raises:
        CutShortError: the file ends too early.
        OSError: the file cannot be read.
    """
    view = memoryview(data)
    while view:
        count = os.preadv(handle, [view[: 1 << 30]], offset)
        if not count:
            raise CutShortError(f"it ends at {offset}, {len(view)} bytes too early")
        view, offset = view[count:], offset + count


def read_file(path: Path, most: int) -> bytearray:
    """The contents of a regular file.

    Raises:
        OSError: the file cannot be read, or is not a regular file.
        ValueError: it has more than `most` bytes, or was truncated while being read.
    """
    with open_file(path) as handle:
        size = os.fstat(handle).st_size
        if size > most:
            raise ValueError(f"it has {size} bytes, at most {most} are read")
        data = bytearray(size)
        read_into(handle, data, 0)
        return data
