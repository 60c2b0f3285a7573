"""Files: the base of backends with one file per block."""

from __future__ import annotations

import re
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from heapq import heapify, heappop, heappush
from time import time
from typing import Any, NamedTuple

from kvkeep.store.backend import ABANDONED_S, Remote, require_budget
from kvkeep.store.block import StoredBlock, is_key, starts_key

SUFFIX = ".safetensors"

_UNKEYED = re.compile(r"/blocks/[0-9a-f]{32}\.safetensors$")  # files of versions with an index


class File(NamedTuple):
    """A file: the time of its last use, or of its creation if the filesystem does not record uses
    (seconds since 1970); its path; its size in bytes; the key of its block, or an empty string."""

    used: float
    path: str
    nbytes: int
    key: str

    @classmethod
    def at(cls, path: str, used: float, nbytes: int) -> File:
        """A file at a path."""
        key = path.rpartition("/blocks/")[2].removesuffix(SUFFIX).replace("-", "/")
        return cls(used, path, nbytes, key if is_key(key) else "")


class Folder(ABC):
    """A directory in some filesystem, which creates missing directories. All methods may raise."""

    @abstractmethod
    def path(self, key: str) -> str:
        """The path of a block's file."""

    @abstractmethod
    def read(self, keys: Sequence[str], most: int | None) -> list[Any]:
        """The first `most` bytes of each block (None: all); None for a missing block."""

    @abstractmethod
    def write(self, block: StoredBlock) -> str:
        """Write a block to `new/`, then move it to its path, which is returned. After an error,
        neither file exists."""

    @abstractmethod
    def put_aside(self, key: str) -> None:
        """Move a block to `quarantine/`, under a `new_name`."""

    @abstractmethod
    def remove(self, path: str) -> None:
        """Remove a file."""

    @abstractmethod
    def listed(self, part: str, start: str = "") -> list[File]:
        """The files of a subdirectory. It may leave out blocks whose keys do not begin with
        `start`, and the times of last use may be out of date; see `now`."""

    def now(self, file: File) -> File:
        """A file with its current time of last use."""
        return file

    def lock(self) -> AbstractContextManager[object]:
        """A context that keeps other processes from putting and evicting blocks, if the filesystem
        has locks."""
        return nullcontext()


def new_name() -> str:
    """The unique name of a file that is no block."""
    return f"{uuid.uuid4().hex}{SUFFIX}"


class _Kept:
    """The blocks of a locked store: their keys, their total bytes, and a heap of their files, the
    least recently used first."""

    def __init__(self, files: Iterable[File] = ()) -> None:
        self._files = [file for file in files if file.key]
        self.keys = {file.key for file in self._files}
        self.nbytes = sum(file.nbytes for file in self._files)
        heapify(self._files)

    def add(self, file: File) -> None:
        self.keys.add(file.key)
        self.nbytes += file.nbytes
        heappush(self._files, file)

    def pop(self) -> File:
        """Take out the least recently used file."""
        file = heappop(self._files)
        self.keys.discard(file.key)
        self.nbytes -= file.nbytes
        return file


class Files(Remote):
    """Blocks in the directory `blocks/`, each in a safetensors file named by its key, which never
    changes. A block is written in `new/` and then moved, so a killed process leaves at most files
    in `new/`, which `gc` removes. A damaged block is moved to `quarantine/`. Errors are misses.

    Args:
        folder: the directory.
        budget: most bytes of all blocks; None: no limit.

    Raises:
        SpecError: a budget below 1.
    """

    def __init__(self, folder: Folder, budget: int | None) -> None:
        require_budget(budget)
        self._folder, self.budget = folder, budget

    def _data(self, keys: Sequence[str], most: int | None = None) -> list[Any]:
        known = [key for key in keys if is_key(key)]
        unknown: list[Any] = [OSError("the store was not asked")] * len(known)
        read = partial(self._folder.read, known, most)
        found = dict(zip(known, self._asked(read, unknown), strict=True))
        return [found.get(key) for key in keys]

    def put_all(self, blocks: Iterable[StoredBlock]) -> int:
        stored: list[str] = []
        with ExitStack() as held:
            kept = _Kept() if self.budget is None else self._locked(held)
            if kept is None:
                return 0
            for block in blocks:
                if self.resting:
                    break
                if block.key in kept.keys or self._put(block, kept):
                    stored.append(block.key)
            self._used(stored)
        return len(stored)

    def _put(self, block: StoredBlock, kept: _Kept) -> bool:
        """Write a block, after making room in the budget."""
        size = block.nbytes
        if self.budget is not None:
            if size > self.budget:
                return False
            self._fit(kept, self.budget - size)
        path = self._asked(partial(self._folder.write, block), None)
        if path is not None:
            kept.add(File(time(), path, size, block.key))
        return path is not None

    def delete(self, key: str) -> None:
        if is_key(key):
            self._asked(lambda: self._folder.remove(self._folder.path(key)), None)

    def quarantine(self, key: str) -> None:
        self.damaged += 1
        if is_key(key):
            self._asked(partial(self._folder.put_aside, key), None)

    def scan(self, prefix: str = "") -> Iterator[str]:
        if not starts_key(prefix):
            return iter(())
        keys = [file.key for file in sorted(self._listed("blocks", prefix))]
        return (key for key in keys if key and key.startswith(prefix))

    def gc(self, older_than: float = ABANDONED_S, budget: int | None = None) -> int:
        require_budget(budget)
        before, freed = time() - older_than, 0
        unkeyed = [file for file in self._listed("blocks") if _UNKEYED.search(file.path)]
        for file in [*self._listed("new"), *self._listed("quarantine"), *unkeyed]:
            if file.used <= before:
                freed += self._remove(file)
        with ExitStack() as held:
            if budget is not None:
                freed += self._fit(self._locked(held) or _Kept(), budget)
        return freed

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
        return _Kept(self._listed("blocks")).nbytes

    def _listed(self, part: str, start: str = "") -> list[File]:
        return self._asked(lambda: self._folder.listed(part, start), [])

    def _locked(self, held: ExitStack) -> _Kept | None:
        """All blocks, after locking them; None if that failed."""

        def listed() -> _Kept:
            held.enter_context(self._folder.lock())
            return _Kept(self._folder.listed("blocks"))

        return self._asked(listed, None)

    def _fit(self, kept: _Kept, budget: int) -> int:
        """Remove the least recently used blocks until the rest fits a budget; returns the bytes
        freed."""
        freed = 0
        while kept.keys and kept.nbytes > budget:
            file = kept.pop()
            now = self._asked(partial(self._folder.now, file), file)
            if now.used > file.used:
                kept.add(now)
            else:
                freed += self._remove(file)
        return freed

    def _remove(self, file: File) -> int:
        """Remove a file; returns the bytes freed."""

        def remove() -> int:
            self._folder.remove(file.path)
            return file.nbytes

        return self._asked(remove, 0)
