"""Location: blocks as objects in any filesystem that fsspec supports."""

from __future__ import annotations

import errno
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, final

from kvkeep.errors import SpecError
from kvkeep.extras import needed_by
from kvkeep.files.atomic import PRIVATE, PRIVATE_DIRECTORY
from kvkeep.store.block import StoredBlock
from kvkeep.store.files import SUFFIX, File, Files, Folder, new_name

_TIMES = ("mtime", "LastModified", "last_modified", "updated", "created")  # names in filesystems
_REFUSED = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT}


def protocols() -> list[str]:
    """The URL schemes that fsspec knows.

    Raises:
        MissingPackageError: fsspec is not installed.
    """
    known: list[str] = _fsspec().available_protocols()
    return known


def _fsspec() -> Any:
    with needed_by("A store at a URL", "remote"):
        return import_module("fsspec")


@final
class Location(Files):
    """A directory of objects such as `s3://bucket/path`, `file:///path` or `memory://path`; see
    `Files`. In the local filesystem, new files and directories are for their owner only.

    Object stores record writes, not uses, so the oldest blocks are removed first. With a budget,
    each `put_all` lists all blocks, and concurrent processes may exceed the budget briefly. If
    listing is slow, give the budget to `gc` instead.

    Args:
        url: a URL that fsspec supports; the package of its filesystem must be installed.
        budget: most bytes of all blocks; None: no limit.
        storage_options: options for fsspec, such as `key=` and `secret=`.

    Raises:
        SpecError: a budget below 1, or fsspec refuses the URL or the options.
        MissingPackageError: fsspec is not installed.
    """

    name: ClassVar[str] = "location"
    _AT_ONCE, _LABELS = 8, 64

    def __init__(self, url: str, budget: int | None = None, **storage_options: Any) -> None:
        self.url, self._objects = url, _Objects(url, storage_options)
        super().__init__(self._objects, budget)
        if re.search(r"[*?\[\]]", url):
            raise SpecError(f"{url} has a wildcard in it; give a path without any of *?[]")
        try:
            self._objects.resolved()
        except (ImportError, ValueError, TypeError) as error:
            raise SpecError(f"fsspec cannot open this URL: {error}") from error
        except Exception as error:  # the location may become available later
            self._failed(error)

    def exists(self) -> bool:
        return self._asked(self._objects.is_there, False)

    def _is_unavailable(self, error: Exception) -> bool:
        return not isinstance(error, PermissionError) and (
            getattr(error, "errno", None) not in _REFUSED
        )


class _Objects(Folder):
    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        self._fsspec, self._url, self._options = _fsspec(), url, options

    def resolved(self) -> tuple[Any, str]:
        """The filesystem object for this thread and process, which fsspec caches, and the path."""
        filesystem, path = self._fsspec.url_to_fs(self._url, **self._options)
        return filesystem, path.rstrip("/")

    def is_there(self) -> bool:
        """Whether blocks were ever put here; raises if not."""
        filesystem, root = self.resolved()
        filesystem.invalidate_cache()
        filesystem.info(f"{root}/blocks")
        return True

    def path(self, key: str) -> str:
        return f"{self.resolved()[1]}/blocks/{key}{SUFFIX}"

    def read(self, keys: Sequence[str], most: int | None) -> list[Any]:
        filesystem, root = self.resolved()
        paths = [f"{root}/blocks/{key}{SUFFIX}" for key in keys]
        found = filesystem.cat_ranges(paths, 0 if most else None, most, on_error="return")
        return list(map(_found, found))

    def write(self, block: StoredBlock) -> str:
        filesystem, root = self.resolved()
        new, path = f"{root}/new/{new_name()}", self.path(block.key)
        for each in (new, path):
            _make_directory(filesystem, root, each.rpartition("/")[0])
        try:
            if _is_local(filesystem):  # a write to an existing file keeps its mode
                Path(new).touch(PRIVATE, exist_ok=False)
            filesystem.pipe_file(new, block.to_bytes())
            filesystem.mv(new, path)
        except BaseException:
            with suppress(Exception):
                filesystem.rm_file(new)
            raise
        return path

    def put_aside(self, key: str) -> None:
        filesystem, root = self.resolved()
        _make_directory(filesystem, root, f"{root}/quarantine")
        filesystem.mv(self.path(key), f"{root}/quarantine/{new_name()}")

    def remove(self, path: str) -> None:
        self.resolved()[0].rm_file(path)

    def listed(self, part: str, start: str = "") -> list[File]:
        filesystem, root = self.resolved()
        filesystem.invalidate_cache()  # other processes write, too
        folder = f"{root}/{part}/{start.rpartition('/')[0]}".rstrip("/")
        found = filesystem.find(folder, detail=True)
        return [
            File.at(path, _written_at(info), info.get("size") or 0)
            for path, info in found.items()
            if info.get("type", "file") == "file"
        ]


def _found(data: Any) -> Any:
    """The bytes of an object; None if it does not exist. Raises any other error."""
    if isinstance(data, FileNotFoundError):
        return None
    if isinstance(data, Exception):
        raise data
    return data


def _is_local(filesystem: Any) -> bool:
    """Whether a filesystem of fsspec is this machine's."""
    names = filesystem.protocol
    return "file" in ((names,) if isinstance(names, str) else names)


def _make_directory(filesystem: Any, root: str, path: str) -> None:
    """Create a directory at the root or below it. In the local filesystem, new directories are for
    their owner only."""
    if not _is_local(filesystem):
        filesystem.makedirs(path, exist_ok=True)
        return
    place = Path(root or "/")
    place.mkdir(PRIVATE_DIRECTORY, parents=True, exist_ok=True)
    for part in Path(path).relative_to(place).parts:
        place /= part
        place.mkdir(PRIVATE_DIRECTORY, exist_ok=True)


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
