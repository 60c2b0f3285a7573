"""Disk: blocks as files in a directory that processes can share."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, ClassVar, final

from filelock import FileLock

from kvkeep.errors import SpecError
from kvkeep.files import tensor_file
from kvkeep.files.atomic import PRIVATE, PRIVATE_DIRECTORY
from kvkeep.reading import NoFileError, open_file, read_into
from kvkeep.store.backend import MOST_BYTES, most_bytes
from kvkeep.store.block import StoredBlock, is_key
from kvkeep.store.files import SUFFIX, File, Files, Folder, new_name

_PARTS = ("blocks", "new", "quarantine")
_REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS)
_WAIT_S = 30.0  # for another thread or process that puts blocks
_RETRY_S = 0.01


@final
class Disk(Files):
    """A directory of blocks; see `Files`. A file's modification time is the block's last use.

    With a budget, blocks are put and evicted under a lock of the file `lock`. Only the owner can
    read the files. A directory without write permission is used read-only.

    Args:
        path: the directory; created if it does not exist.
        budget: most bytes of block files; the least recently used are removed first. None: no
            limit.

    Raises:
        SpecError: the budget is below 1, or the path is no directory and cannot be created.
    """

    name: ClassVar[str] = "disk"
    _LABELS = 1  # a file that cannot be read hides no other

    def __init__(self, path: str | os.PathLike[str], budget: int | None = None) -> None:
        self.path = Path(path)
        super().__init__(_Directory(os.fspath(self.path)), budget)
        self._open()

    def _exist(self, keys: Sequence[str]) -> list[bool | None]:
        return [is_key(key) and os.path.lexists(self._folder.path(key)) for key in keys]

    def _is_unavailable(self, error: Exception) -> bool:
        return False  # another block may be readable

    def _used(self, keys: Sequence[str]) -> None:
        """Set the time of last use. Later blocks of a prompt get slightly older times, so that a
        prompt is evicted from its end."""
        now = time.time()
        for index, key in enumerate(keys):
            used = now - 1e-5 * index
            with suppress(OSError):  # the file was removed, or has another owner
                os.utime(self._folder.path(key), (used, used), follow_symlinks=False)

    def _open(self) -> None:
        """Create the directories, or check that the store exists and can be read."""
        if os.path.exists(self.path) and not os.path.isdir(self.path):
            raise SpecError(
                f"{self.path} is not a directory; give a directory or the path of a new one"
            )
        try:
            _make_directories(self.path)
        except OSError as error:
            if error.errno not in _REFUSED or not os.path.isdir(self.path / "blocks"):
                raise SpecError(
                    f"no store can be created at {self.path}: {error}; give another path"
                ) from error
        for part in _PARTS:
            if (self.path / part).is_symlink():
                raise SpecError(
                    f"{self.path / part} is a symbolic link, but files are deleted there; move the "
                    "whole store and link to its directory instead"
                )


class _Directory(Folder):
    def __init__(self, path: str) -> None:
        self._path = path
        self._known: dict[tuple[str, int], File] = {}  # by name and inode

    def path(self, key: str) -> str:
        return f"{self._path}/blocks/{key.replace('/', '-')}{SUFFIX}"

    def read(self, keys: Sequence[str], most: int | None) -> list[Any]:
        return [_content(self.path(key), most) for key in keys]

    def write(self, block: StoredBlock) -> str:
        _make_directories(self._path)
        place, partial = Path(self.path(block.key)), Path(self._path, "new")
        content = block.tensors(), block.metadata()
        tensor_file.write(place, *content, sync=False, private=True, partial=partial)
        return str(place)

    def put_aside(self, key: str) -> None:
        _make_directories(self._path)
        os.replace(self.path(key), f"{self._path}/quarantine/{new_name()}")

    def remove(self, path: str) -> None:
        os.unlink(path)

    def listed(self, part: str, start: str = "") -> list[File]:
        """`stat` takes most of the time, so it is not called again for files known from an earlier
        call: a block's size never changes."""
        found, start = dict[tuple[str, int], File](), start.replace("/", "-")
        with os.scandir(f"{self._path}/{part}") as entries:
            for entry in entries:
                if entry.name.startswith(start) and not entry.is_dir(follow_symlinks=False):
                    place = entry.name, entry.inode()
                    with suppress(FileNotFoundError):  # another process removed it
                        found[place] = self._known.get(place) or _file(entry.path)
        if part == "blocks" and not start:
            self._known = found
        return list(found.values())

    def now(self, file: File) -> File:
        return _file(file.path)

    def lock(self) -> AbstractContextManager[object]:
        _make_directories(self._path)
        path = f"{self._path}/lock"
        return FileLock(path, timeout=_WAIT_S, mode=PRIVATE, poll_interval=_RETRY_S)


def _make_directories(path: str | Path) -> None:
    """Create the missing directories of a store."""
    path = Path(path)
    if not all(os.path.isdir(path / part) for part in _PARTS):
        path.mkdir(PRIVATE_DIRECTORY, parents=True, exist_ok=True)
        for part in _PARTS:
            (path / part).mkdir(PRIVATE_DIRECTORY, exist_ok=True)


def _file(path: str) -> File:
    status = os.stat(path, follow_symlinks=False)
    return File.at(path, status.st_mtime, status.st_size)


def _content(path: str, most: int | None) -> bytearray | None:
    """The bytes of a block; None if there is no file, empty if it is irregular or too large. The
    file is not memory-mapped, so that its truncation raises an error instead of a crash."""
    try:
        with open_file(Path(path), follow=False) as handle:
            size = os.fstat(handle).st_size
            if most is None and size > MOST_BYTES:
                return bytearray()
            size = size if most is None else min(size, most)
            if size > most_bytes():
                raise MemoryError(f"a block of {size} bytes does not fit in free memory")
            data = bytearray(size)
            read_into(handle, data, 0)
            return data
    except FileNotFoundError:
        return None
    except (NoFileError, ValueError):
        return bytearray()
