"""Files: the base of backends with one file per block."""

from __future__ import annotations

import re
import uuid
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from heapq import heapify, heappop, heappush
from time import time
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

from kvkeep.store.backend import ABANDONED_S, Remote, require_budget
from kvkeep.store.block import LABEL_BYTES, Label, StoredBlock, is_key, starts_key

SUFFIX = ".safetensors"

_UNKEYED = re.compile(r"/blocks/[0-9a-f]{32}\.safetensors$")  # files of versions with an index


class File(NamedTuple):
    """A file: the time of its last use, or of its creation if the filesystem does not record uses
    (seconds since 1970); its path; its size in bytes."""

    used: float
    path: str
    nbytes: int


class _Kept:
    """The blocks of a locked store: their keys, their total bytes, and a heap of their files, the
    least recently used first."""

    def __init__(self, files: Mapping[str, File] = MappingProxyType({})) -> None:
        self.keys = set(files)
        self.nbytes = sum(file.nbytes for file in files.values())
        self._files = list(files.values())
        heapify(self._files)

    def add(self, key: str, file: File) -> None:
        self.keys.add(key)
        self.nbytes += file.nbytes
        heappush(self._files, file)

    def pop(self) -> File:
        """Take out the least recently used file."""
        file = heappop(self._files)
        self.keys.discard(key_at(file.path))
        self.nbytes -= file.nbytes
        return file


class Files(Remote):
    """Blocks in the directory `blocks/`, each in a safetensors file named by its key, which never
    changes. A block is written in `new/` and then moved, so a killed process leaves at most files
    in `new/`, which `gc` removes. A damaged block is moved to `quarantine/`.

    Subclasses read, write, move, list and remove files. Errors are misses.

    Args:
        budget: most bytes of all blocks; None: no limit.

    Raises:
        SpecError: a budget below 1.
    """

    _AT_ONCE: ClassVar[int] = 1  # blocks per read

    def __init__(self, budget: int | None) -> None:
        require_budget(budget)
        self.budget = budget

    @abstractmethod
    def _path(self, key: str) -> str:
        """The path of a block's file."""

    @abstractmethod
    def _read(self, keys: Sequence[str], most: int | None = None) -> list[Any]:
        """The first `most` bytes of each block (None: all), or the error."""

    @abstractmethod
    def _written(self, block: StoredBlock) -> tuple[int, Any]:
        """The size of a block's file in bytes, and the content for `_write`."""

    @abstractmethod
    def _write(self, new: str, path: str, content: Any) -> None:
        """Write a file at `new` and move it to `path`; after an error neither file exists."""

    @abstractmethod
    def _move(self, path: str, target: str) -> None:
        """Move a file."""

    @abstractmethod
    def _unlink(self, path: str) -> None:
        """Remove a file."""

    @abstractmethod
    def _listed(self, part: str, start: str = "") -> list[File]:
        """The files of a subdirectory. It may leave out blocks whose keys do not begin with
        `start`."""

    def _blocks(self) -> dict[str, File]:
        """The files of all blocks by key. Their times of last use may be out of date; see
        `_used_since`."""
        return {key: file for file in self._listed("blocks") if (key := key_at(file.path))}

    def _used_since(self, file: File) -> File | None:
        """A block's file with its current time of last use, if it was used after `file.used`;
        otherwise None."""
        return None

    def _place(self, part: str) -> str:
        """The path of a new file in a subdirectory."""
        return f"{self._root}/{part}/{uuid.uuid4().hex}{SUFFIX}"

    @property
    @abstractmethod
    def _root(self) -> str:
        """The path of the store."""

    def _lock(self, held: ExitStack) -> None:
        """Keep other processes from putting and evicting blocks until `held` is closed, if the
        filesystem has locks."""

    def _touch(self, keys: Sequence[str]) -> None:
        """Record the use of a prompt's blocks, if the filesystem can."""

    def get(self, key: str, *, used: bool = True) -> StoredBlock | None:
        [block] = self._get_blocks([key])
        if used and block is not None:
            self._touch([key])
        return block

    def leading(self, keys: Sequence[str]) -> list[StoredBlock]:
        found = list(self._leading(keys))
        self._touch(keys[: len(found)])
        return found

    def _leading(self, keys: Sequence[str]) -> Iterator[StoredBlock]:
        for start in range(0, len(keys), self._AT_ONCE):
            for block in self._get_blocks(keys[start : start + self._AT_ONCE]):
                if block is None:
                    return
                yield block

    def put_all(self, blocks: Iterable[StoredBlock]) -> int:
        stored: list[str] = []
        with ExitStack() as held:
            kept = _Kept() if self.budget is None else self._locked_blocks(held)
            if kept is None:
                return 0
            for block in blocks:
                if self.resting:
                    break
                if block.key in kept.keys or self._put(block, kept):
                    stored.append(block.key)
            self._touch(stored)
        return len(stored)

    def _put(self, block: StoredBlock, kept: _Kept) -> bool:
        """Write a block, after making room in the budget."""
        size, content = self._written(block)
        if self.budget is not None:
            if size > self.budget:
                return False
            self._fit(kept, self.budget - size)

        def write() -> File:
            path = self._path(block.key)
            self._write(self._place("new"), path, content)
            return File(time(), path, size)

        file = self._asked(write, None)
        if file is not None:
            kept.add(block.key, file)
        return file is not None

    def delete(self, key: str) -> None:
        if is_key(key):
            self._asked(lambda: self._unlink(self._path(key)), None)

    def quarantine(self, key: str) -> None:
        self.damaged += 1
        if is_key(key):
            self._asked(lambda: self._move(self._path(key), self._place("quarantine")), None)

    def scan(self, prefix: str = "") -> Iterator[str]:
        if not starts_key(prefix):
            return iter(())
        keys = [key_at(file.path) for file in sorted(self._files("blocks", prefix))]
        return (key for key in keys if key and key.startswith(prefix))

    def labels(self, keys: Sequence[str]) -> list[Label | None]:
        found = self._read(keys, LABEL_BYTES)
        return [self._label(key, data) for key, data in zip(keys, found, strict=True)]

    def gc(self, older_than: float = ABANDONED_S, budget: int | None = None) -> int:
        require_budget(budget)
        before, freed = time() - older_than, 0
        unkeyed = [file for file in self._files("blocks") if _UNKEYED.search(file.path)]
        for file in [*self._files("new"), *self._files("quarantine"), *unkeyed]:
            if file.used <= before:
                freed += self._remove(file)
        with ExitStack() as held:
            if budget is not None:
                freed += self._fit(self._locked_blocks(held) or _Kept(), budget)
        return freed

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
        return _Kept(self._asked(self._blocks, {})).nbytes

    def _get_blocks(self, keys: Sequence[str]) -> list[StoredBlock | None]:
        return [self._checked(key, data) for key, data in zip(keys, self._read(keys), strict=True)]

    def _files(self, part: str, start: str = "") -> list[File]:
        return self._asked(lambda: self._listed(part, start), [])

    def _locked_blocks(self, held: ExitStack) -> _Kept | None:
        """All blocks, after locking them; None if that failed."""

        def listed() -> _Kept:
            self._lock(held)
            return _Kept(self._blocks())

        return self._asked(listed, None)

    def _fit(self, kept: _Kept, budget: int) -> int:
        """Remove the least recently used blocks until the rest fits a budget; returns the bytes
        freed."""
        freed = 0
        while kept.keys and kept.nbytes > budget:
            file = kept.pop()
            if used := self._used_since(file):
                kept.add(key_at(file.path), used)
            else:
                freed += self._remove(file)
        return freed

    def _remove(self, file: File) -> int:
        """Remove a file; returns the bytes freed."""

        def remove() -> int:
            self._unlink(file.path)
            return file.nbytes

        return self._asked(remove, 0)


def key_at(path: str) -> str:
    """The key of the block at a path; empty if the path is not a block's."""
    key = path.rpartition("/blocks/")[2].removesuffix(SUFFIX).replace("-", "/")
    return key if is_key(key) else ""
