"""Disk: blocks as files in a directory that processes can share."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import Any, ClassVar, final

from torch import Tensor

from kvkeep.errors import SpecError
from kvkeep.files import tensor_file
from kvkeep.files.atomic import PRIVATE, PRIVATE_DIRECTORY
from kvkeep.reading import NoFileError, open_file, read_into
from kvkeep.store.backend import MOST_BYTES, most_bytes
from kvkeep.store.block import StoredBlock, is_key
from kvkeep.store.files import SUFFIX, File, Files, key_at

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

    def __init__(self, path: str | os.PathLike[str], budget: int | None = None) -> None:
        super().__init__(budget)
        self.path = Path(path)
        self._known: dict[tuple[str, int], tuple[str, File]] = {}  # by name and inode
        self._open()

    def contains(self, key: str) -> bool:
        return is_key(key) and os.path.lexists(self._path(key))

    @property
    def _root(self) -> str:
        return os.fspath(self.path)

    def _path(self, key: str) -> str:
        return f"{self.path}/blocks/{key.replace('/', '-')}{SUFFIX}"

    def _read(self, keys: Sequence[str], most: int | None = None) -> list[Any]:
        return [self._content(key, most) for key in keys]

    def _content(self, key: str, most: int | None) -> bytearray | Exception:
        """The bytes of a block; empty if the file is irregular or too large. The file is not
        memory-mapped, so that its truncation raises an error instead of a crash."""
        if not is_key(key):
            return FileNotFoundError()
        try:
            with open_file(Path(self._path(key)), follow=False) as handle:
                size = os.fstat(handle).st_size
                if most is None and size > MOST_BYTES:
                    return bytearray()
                size = size if most is None else min(size, most)
                if size > most_bytes():
                    raise MemoryError(f"a block of {size} bytes does not fit in free memory")
                data = bytearray(size)
                read_into(handle, data, 0)
                return data
        except FileNotFoundError as error:
            return error
        except (NoFileError, ValueError):
            return bytearray()
        except (OSError, MemoryError) as error:  # the block itself may be intact
            self._failed(error)
            return error

    def _written(self, block: StoredBlock) -> tuple[int, Any]:
        content = block.tensors(), block.metadata()
        return tensor_file.size(*content), content

    def _write(
        self, new: str, path: str, content: tuple[Mapping[str, Tensor], Mapping[str, str]]
    ) -> None:
        self._make_directories()
        try:
            tensor_file.write(Path(new), *content, sync=False, private=True)
            os.replace(new, path)
        except BaseException:
            Path(new).unlink(missing_ok=True)
            raise

    def _move(self, path: str, target: str) -> None:
        self._make_directories()
        os.replace(path, target)

    def _unlink(self, path: str) -> None:
        os.unlink(path)

    def _listed(self, part: str, start: str = "") -> list[File]:
        found, start = list[File](), start.replace("/", "-")
        for entry in self._entries(part):
            if entry.name.startswith(start):
                with suppress(FileNotFoundError):  # another process removed it
                    found.append(_file(entry.path))
        return found

    def _blocks(self) -> dict[str, File]:
        """The files of all blocks by key. `stat` takes most of the time, so it is not called again
        for files known from an earlier call: a block's size never changes."""
        found = dict[tuple[str, int], tuple[str, File]]()
        for entry in self._entries("blocks"):
            place = entry.name, entry.inode()
            if place in self._known:
                found[place] = self._known[place]
            elif key := key_at(entry.path):
                with suppress(FileNotFoundError):  # another process removed it
                    found[place] = key, _file(entry.path)
        self._known = found
        return dict(found.values())

    def _entries(self, part: str) -> Iterator[os.DirEntry[str]]:
        with os.scandir(f"{self.path}/{part}") as entries:
            for entry in entries:
                if not entry.is_dir(follow_symlinks=False):
                    yield entry

    def _used_since(self, file: File) -> File | None:
        with suppress(FileNotFoundError):
            now = _file(file.path)
            return now if now.used > file.used else None
        return None

    def _touch(self, keys: Sequence[str]) -> None:
        """Set the time of last use. Later blocks of a prompt get slightly older times, so that a
        prompt is evicted from its end."""
        now = time.time()
        for index, key in enumerate(keys):
            used = now - 1e-5 * index
            with suppress(OSError):  # the file was removed, or has another owner
                os.utime(self._path(key), (used, used), follow_symlinks=False)

    def _lock(self, held: ExitStack) -> None:
        self._make_directories()
        held.enter_context(_locked(self.path / "lock"))

    def _is_unavailable(self, error: Exception) -> bool:
        return False

    def _make_directories(self) -> None:
        """Create missing directories."""
        if not all(os.path.isdir(self.path / part) for part in _PARTS):
            self.path.mkdir(PRIVATE_DIRECTORY, parents=True, exist_ok=True)
            for part in _PARTS:
                (self.path / part).mkdir(PRIVATE_DIRECTORY, exist_ok=True)

    def _open(self) -> None:
        """Create the directories, or check that the store exists and can be read."""
        if os.path.exists(self.path) and not os.path.isdir(self.path):
            raise SpecError(
                f"{self.path} is not a directory; give a directory or the path of a new one"
            )
        try:
            self._make_directories()
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


def _file(path: str) -> File:
    status = os.stat(path, follow_symlinks=False)
    return File(status.st_mtime, path, status.st_size)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock that excludes all other threads and processes.

    Raises:
        TimeoutError: the lock was taken for `_WAIT_S` seconds.
        OSError: the file cannot be opened.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with FileIO(path, "r+b", opener=lambda path, _: os.open(path, flags, PRIVATE)) as file:
        until = time.monotonic() + _WAIT_S
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() >= until:
                    raise TimeoutError(
                        f"another thread or process held {path} for {_WAIT_S} s"
                    ) from error
            time.sleep(_RETRY_S)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # a forked child may still have the file open
