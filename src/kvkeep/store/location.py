"""Location: blocks as objects in any filesystem that fsspec supports."""

from __future__ import annotations

import errno
import re
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import datetime
from importlib import import_module
from pathlib import Path
from time import time
from typing import Any, ClassVar, NamedTuple, final

from kvkeep.errors import SpecError
from kvkeep.extras import needed_by
from kvkeep.files.atomic import PRIVATE, PRIVATE_DIRECTORY
from kvkeep.store.backend import (
    ABANDONED_S,
    LABEL_BYTES,
    Label,
    StoredBlock,
    is_key,
    require_budget,
)
from kvkeep.store.remote import Remote

_SUFFIX = ".safetensors"
_AT_ONCE = 8  # blocks read concurrently
_TIMES = ("mtime", "LastModified", "last_modified", "updated", "created")  # filesystems' fields
_REFUSED = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT}


def protocols() -> list[str]:
    """The schemes of the URLs that fsspec knows.

    Raises:
        MissingPackageError: fsspec is not installed.
    """
    known: list[str] = _fsspec().available_protocols()
    return known


def _fsspec() -> Any:
    with needed_by("A store at a URL", "remote"):
        return import_module("fsspec")


class _File(NamedTuple):
    written: float
    path: str
    nbytes: int


@final
class Location(Remote):
    """A directory of objects such as `s3://bucket/path`, `file:///path` or `memory://path`, with
    one object per block. A block is written to `new/` and then moved to `blocks/`; a damaged block
    is moved to `quarantine/`. In this machine's filesystem new files and directories are for their
    owner only.

    Object stores record when an object was written, not when it was last used, so the oldest
    blocks are removed first. With a budget, each put lists all blocks, and several processes may
    exceed it briefly. Where listing is slow, give no budget here, but to `gc`.

    Args:
        url: of a filesystem that fsspec supports; the package for it must be installed.
        budget: most bytes of all blocks; None: no limit.
        storage_options: options for fsspec, such as `key=` and `secret=`.

    Raises:
        SpecError: a budget below 1, or a URL or options that fsspec cannot take.
        MissingPackageError: fsspec is not installed.
    """

    name: ClassVar[str] = "location"

    def __init__(self, url: str, budget: int | None = None, **storage_options: Any) -> None:
        super().__init__()
        require_budget(budget)
        if re.search(r"[*?\[\]]", url):
            raise SpecError(f"{url} has a wildcard in it; give a path without any of *?[]")
        self._fsspec = _fsspec()
        self.url = url
        self.budget = budget
        self._options = storage_options
        try:
            self._resolved()
        except (ImportError, ValueError, TypeError) as error:
            raise SpecError(f"fsspec cannot open this URL: {error}") from error
        except Exception as error:  # the location may become available later
            self._failed(error)

    def get(self, key: str, *, used: bool = True) -> StoredBlock | None:
        return self._get_blocks([key])[0]

    def put(self, block: StoredBlock) -> bool:
        return self.contains(block.key) or self.put_all([block]) == 1

    def contains(self, key: str) -> bool:
        return isinstance(self._read([key], 1)[0], bytes)

    def delete(self, key: str) -> None:
        if is_key(key):
            self._remove(self._path(key))

    def quarantine(self, key: str) -> None:
        self.damaged += 1
        if is_key(key):
            self._asked(lambda: self._move_to_quarantine(key), None)

    def scan(self, prefix: str = "") -> Iterator[str]:
        if not re.fullmatch(r"[0-9a-z/-]*", prefix):
            return iter(())
        folder = prefix.rpartition("/")[0]
        keys = (_key_at(file.path) for file in self._files(f"blocks/{folder}".rstrip("/")))
        return iter([key for key in keys if key is not None and key.startswith(prefix)])

    def leading(self, keys: Sequence[str]) -> list[StoredBlock]:
        found: list[StoredBlock] = []
        for start in range(0, len(keys), _AT_ONCE):
            for block in self._get_blocks(keys[start : start + _AT_ONCE]):
                if block is None:
                    return found
                found.append(block)
        return found

    def missing(self, keys: Sequence[str]) -> list[str]:
        there = self._read(keys, 1)
        return [key for key, data in zip(keys, there, strict=True) if _is_missing(data)]

    def put_all(self, blocks: Iterable[StoredBlock]) -> int:
        done = 0
        for block in blocks:
            if self.resting:
                break
            data = block.to_bytes()
            if self.budget is None or len(data) <= self.budget:
                done += self._write(block.key, data)
        if done:
            self._fit(self.budget)
        return done

    def labels(self, keys: Sequence[str]) -> list[Label | None]:
        found = self._read(keys, LABEL_BYTES)
        return [
            self._label(key, data if isinstance(data, bytes) else None)
            for key, data in zip(keys, found, strict=True)
        ]

    def gc(self, older_than: float = ABANDONED_S, budget: int | None = None) -> int:
        require_budget(budget)
        before, freed = time() - older_than, 0
        for file in [*self._files("new"), *self._files("quarantine")]:
            if file.written <= before:
                freed += self._remove(file.path) * file.nbytes
        return freed + self._fit(budget)

    def exists(self) -> bool:
        return self._asked(self._is_there, False)

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
        return sum(file.nbytes for file in self._files("blocks"))

    def _resolved(self) -> tuple[Any, str]:
        """The filesystem object for this thread and process, which fsspec caches, and the path."""
        filesystem, path = self._fsspec.url_to_fs(self.url, **self._options)
        return filesystem, path.rstrip("/")

    def _is_there(self) -> bool:
        filesystem, root = self._resolved()
        filesystem.invalidate_cache()
        filesystem.info(f"{root}/blocks")
        return True

    def _path(self, key: str) -> str:
        return f"{self._resolved()[1]}/blocks/{key}{_SUFFIX}"

    def _get_blocks(self, keys: Sequence[str]) -> list[StoredBlock | None]:
        return [self._block(key, data) for key, data in zip(keys, self._read(keys), strict=True)]

    def _block(self, key: str, data: Any) -> StoredBlock | None:
        return self._checked(key, data) if isinstance(data, bytes) else None

    def _read(self, keys: Sequence[str], most: int | None = None) -> list[Any]:
        """For each block its first `most` bytes (None: all), or the error."""
        absent = FileNotFoundError()
        known = [key for key in keys if is_key(key)]

        def read() -> list[Any]:
            filesystem, root = self._resolved()
            paths = [f"{root}/blocks/{key}{_SUFFIX}" for key in known]
            found = filesystem.cat_ranges(paths, 0 if most else None, most, on_error="return")
            for data in found:
                if isinstance(data, Exception) and not _is_missing(data):
                    raise data
            return list(found)

        unknown = OSError("the location was not asked")
        found = dict(zip(known, self._asked(read, [unknown] * len(known)), strict=True))
        return [found.get(key, absent) for key in keys]

    def _write(self, key: str, data: bytes) -> bool:
        def write() -> bool:
            filesystem, root = self._resolved()
            new, path = f"{root}/new/{uuid.uuid4().hex}{_SUFFIX}", self._path(key)
            for each in (new, path):
                _make_directory(filesystem, root, each.rpartition("/")[0])
            try:
                if _is_local(filesystem):  # it writes to a file that is there, and keeps the mode
                    Path(new).touch(PRIVATE, exist_ok=False)
                filesystem.pipe_file(new, data)
                filesystem.mv(new, path)
            except BaseException:
                with suppress(Exception):
                    filesystem.rm_file(new)
                raise
            return True

        return bool(is_key(key)) and self._asked(write, False)

    def _move_to_quarantine(self, key: str) -> None:
        filesystem, root = self._resolved()
        _make_directory(filesystem, root, f"{root}/quarantine")
        filesystem.mv(self._path(key), f"{root}/quarantine/{uuid.uuid4().hex}{_SUFFIX}")

    def _remove(self, path: str) -> bool:
        def remove() -> bool:
            self._resolved()[0].rm_file(path)
            return True

        return self._asked(remove, False)

    def _files(self, part: str) -> list[_File]:
        """The files in one of the location's subdirectories."""

        def listed() -> list[_File]:
            filesystem, root = self._resolved()
            filesystem.invalidate_cache()  # other processes write there too
            found = filesystem.find(f"{root}/{part}", detail=True)
            return [
                _File(_written_at(info), path, info.get("size") or 0)
                for path, info in found.items()
                if info.get("type", "file") == "file"
            ]

        return self._asked(listed, [])

    def _fit(self, budget: int | None) -> int:
        """Remove the oldest blocks until the rest fits a budget; returns the bytes freed."""
        freed = 0
        if budget is not None:
            files = self._files("blocks")
            over = sum(file.nbytes for file in files) - budget
            for file in sorted(files):
                if freed >= over:
                    break
                freed += self._remove(file.path) * file.nbytes
        return freed

    def _is_unavailable(self, error: Exception) -> bool:
        return not isinstance(error, PermissionError) and (
            getattr(error, "errno", None) not in _REFUSED
        )


def _is_local(filesystem: Any) -> bool:
    """Whether a filesystem of fsspec is that of this machine."""
    names = filesystem.protocol
    return "file" in ((names,) if isinstance(names, str) else names)


def _make_directory(filesystem: Any, root: str, path: str) -> None:
    """Create a directory at the root or below it. On this machine only its owner may use it, and
    the directories above it down to the root."""
    if not _is_local(filesystem):
        filesystem.makedirs(path, exist_ok=True)
        return
    place = Path(root or "/")
    place.mkdir(PRIVATE_DIRECTORY, parents=True, exist_ok=True)
    for part in Path(path).relative_to(place).parts:
        place /= part
        place.mkdir(PRIVATE_DIRECTORY, exist_ok=True)


def _is_missing(data: Any) -> bool:
    return isinstance(data, FileNotFoundError)


def _key_at(path: str) -> str | None:
    """The key of the block at a path; None if the path is not a block's."""
    key = path.rpartition("/blocks/")[2].removesuffix(_SUFFIX)
    return key if is_key(key) else None


def _written_at(info: dict[str, Any]) -> float:
    """When an object was written, in seconds since 1970; 0 if unknown."""
    for name in _TIMES:
        when = info.get(name)
        if isinstance(when, str):
            when = datetime.fromisoformat(when)
        if isinstance(when, datetime):
            return when.timestamp()
        if isinstance(when, (int, float)):
            return float(when)
    return 0.0
