"""Disk: blocks as immutable files, found by an SQLite index; for several processes at once."""

from __future__ import annotations

import errno
import os
import sqlite3
import stat
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import ClassVar, TypeVar, cast, final

from kvkeep.errors import SpecError
from kvkeep.files import tensor_file
from kvkeep.files.atomic import PRIVATE_DIRECTORY, NoFileError, opened, read_into
from kvkeep.files.tensor_file import Layout, header_bytes
from kvkeep.store.backend import (
    ABANDONED_S,
    HEADER_BYTES,
    MOST_BYTES,
    Backend,
    Block,
    Label,
    OtherBlockError,
    is_key,
    most_bytes,
    require_budget,
)
from kvkeep.store.index import MOST_BYTES as INDEXED_BYTES
from kvkeep.store.index import NAME, Index, Row, is_row

_PARTS = ("blocks", "new", "quarantine")
_REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS)

Answer = TypeVar("Answer")


@final
class Disk(Backend):
    """A directory: `index.sqlite` in WAL mode, `blocks/` with one safetensors file for each, and
    `quarantine/` with those that were found damaged.

    A file is written whole before the index names it and is never changed, and it is forgotten by
    the index before it is removed: whoever is killed leaves at most a file that nobody names, which
    `gc` removes. Files are made for their owner alone. An index that is damaged is made again of
    the blocks, and a directory that may not be written to is read.

    Args:
        path: the directory; made if it is not there.
        budget: most bytes of files; those used longest ago go first. None: as many as come.

    Raises:
        SpecError: a budget below 1, or a path that is no directory, or where none can be made.
    """

    name: ClassVar[str] = "disk"

    def __init__(self, path: str | os.PathLike[str], budget: int | None = None) -> None:
        self.path = Path(path)
        require_budget(budget)
        self.budget = budget
        writable = self._made()
        rows = partial(_rows, self.path / "blocks")
        self._index = Index(self.path, rows, self.path / "quarantine", writable=writable)
        self._asked(self._index.require_sound, None)

    @property
    def writable(self) -> bool:
        """Whether blocks can be put here."""
        return self._index.writable

    def get(self, key: str, *, used: bool = True) -> Block | None:
        file = self._file(key)
        if file is None:
            return None
        try:
            block = Block.from_bytes(_whole(file), key)
        except FileNotFoundError:  # removed by another process meanwhile, or by hand
            self._forget(key, file.name)
            return None
        except OtherBlockError as error:  # the index is wrong, not the block
            self.damaged += 1
            self._forget(key, file.name)
            with suppress(OSError):
                self._note(Row(str(error), file.name, file.stat().st_size, time.time()))
            return None
        except (NoFileError, ValueError):
            self._put_aside(key, file)
            return None
        except (OSError, MemoryError) as error:  # which says nothing of the block
            self._failed(error)
            return None
        if used:
            self._use([key])
        return block

    def leading(self, keys: Sequence[str]) -> list[Block]:
        found: list[Block] = []
        for key in keys:
            block = self.get(key, used=False)
            if block is None:
                break
            found.append(block)
        self._use(keys[: len(found)])
        return found

    def put_all(self, blocks: Iterable[Block]) -> int:
        kept = [block.key for block in blocks if self.put(block)]
        self._use(kept)
        return len(kept)

    def put(self, block: Block) -> bool:
        if self.contains(block.key):
            return True
        if not self.writable:
            self._failed(PermissionError(f"{self.path} may not be written to"))
            return False
        file = self.path / "blocks" / f"{uuid.uuid4().hex}.safetensors"
        new = self.path / "new" / file.name
        try:
            tensor_file.write(new, block.tensors(), block.metadata(), sync=False, private=True)
            size = new.stat().st_size
            new.replace(file)
            row = Row(block.key, file.name, size, time.time())

            def enter(index: sqlite3.Connection) -> list[str]:
                done = index.execute("insert or ignore into blocks values (?, ?, ?, ?)", row)
                return _over(self.budget, index) if done.rowcount else [file.name]

            removed = self._index.change(enter)
        except (OSError, sqlite3.Error) as error:
            self._failed(error)
            for left in (new, file):
                with suppress(OSError):
                    left.unlink()
            return False
        self._remove(removed)
        return file.name not in removed

    def contains(self, key: str) -> bool:
        return self._file(key) is not None

    def delete(self, key: str) -> None:
        file = self._file(key)
        if file is not None:
            self._forget(key, file.name)
            self._remove([file.name])

    def quarantine(self, key: str) -> None:
        file = self._file(key)
        if file is None:
            self.damaged += 1
        else:
            self._put_aside(key, file)

    def scan(self, prefix: str = "") -> Iterator[str]:
        def keys(index: sqlite3.Connection) -> list[str]:
            found = index.execute(
                "select key from blocks where key >= ? and key < ?", (prefix, prefix + "\U0010ffff")
            )
            return [key for (key,) in found if is_key(key)]

        nothing: list[str] = []
        return iter(self._asked(lambda: self._index.ask(keys), nothing))

    def labels(self, keys: Sequence[str]) -> list[Label | None]:
        return [self._label(key, self._first_bytes(key)) for key in keys]

    def exists(self) -> bool:
        return True

    @property
    def nbytes(self) -> int:
        """Bytes of all files that are named."""
        return self._asked(lambda: self._index.ask(_total), 0)

    def gc(self, older_than: float = ABANDONED_S, budget: int | None = None) -> int:
        require_budget(budget)
        if not self.writable:
            self._failed(PermissionError(f"{self.path} may not be written to"))
            return 0
        freed = 0
        if budget is not None:
            before = self.nbytes

            def over() -> list[str]:
                return self._index.change(lambda index: _over(budget, index))

            self._remove(self._asked(over, []))
            freed = before - self.nbytes
        named = self._asked(lambda: self._index.ask(_names), None)
        if named is None:  # nobody knows what is abandoned
            return freed
        abandoned = time.time() - older_than
        unnamed = [
            file
            for part in _PARTS
            for file in self._files(part)
            if part == "quarantine" or (NAME.fullmatch(file.name) and file.name not in named)
        ]
        for file in [*unnamed, *self._index.leftovers()]:
            with suppress(OSError):
                status = file.lstat()
                if status.st_mtime <= abandoned and not stat.S_ISDIR(status.st_mode):
                    file.unlink()
                    freed += status.st_size
        return freed

    def _made(self) -> bool:
        """Make the directories, as far as they are not there; whether they may be written to."""
        if os.path.exists(self.path) and not os.path.isdir(self.path):
            raise SpecError(f"{self.path} is no directory; give one, or a path for a new one")
        writable = True
        try:
            self.path.mkdir(mode=PRIVATE_DIRECTORY, parents=True, exist_ok=True)
            for part in _PARTS:
                (self.path / part).mkdir(mode=PRIVATE_DIRECTORY, exist_ok=True)
        except OSError as error:
            writable = False
            if error.errno not in _REFUSED or not os.path.isdir(self.path / "blocks"):
                raise SpecError(
                    f"no store can be made at {self.path}: {error}; give another place"
                ) from error
        for part in _PARTS:
            if (self.path / part).is_symlink():
                raise SpecError(
                    f"{self.path / part} is a link, but files are removed there; put the whole "
                    "store elsewhere and link to that"
                )
        places = [self.path, *(self.path / part for part in _PARTS)]
        return writable and all(os.access(place, os.W_OK | os.X_OK) for place in places)

    def _files(self, part: str) -> list[Path]:
        """What lies in one of the directories."""
        try:
            return list((self.path / part).iterdir())
        except OSError as error:
            self._failed(error)
            return []

    def _use(self, keys: Sequence[str]) -> None:
        """Note that blocks of one prompt were used; its end goes before what it begins with."""
        rows = [(time.time() - 1e-5 * index, key) for index, key in enumerate(keys)]
        if rows and self.writable:
            update = "update blocks set used = ? where key = ?"
            self._changed(lambda index: index.executemany(update, rows))

    def _file(self, key: str) -> Path | None:
        """Where the index says that a block is, if that is where blocks are."""

        def row(index: sqlite3.Connection) -> tuple[object] | None:
            found = index.execute("select file from blocks where key = ?", (key,)).fetchone()
            return cast("tuple[object] | None", found)

        found = self._asked(lambda: self._index.ask(row), None) if is_key(key) else None
        if found is None:
            return None
        (name,) = found
        if not isinstance(name, str) or not NAME.fullmatch(name):
            self.damaged += 1
            self._changed(lambda index: index.execute("delete from blocks where key = ?", (key,)))
            return None
        return self.path / "blocks" / name

    def _first_bytes(self, key: str) -> bytes | None:
        file = self._file(key)
        if file is None:
            return None
        try:
            return _start(file)
        except (OSError, ValueError):
            return b""

    def _put_aside(self, key: str, file: Path) -> None:
        self.damaged += 1
        self._forget(key, file.name)
        with suppress(OSError):
            file.replace(self.path / "quarantine" / file.name)

    def _forget(self, key: str, file: str) -> None:
        self._changed(
            lambda index: index.execute(
                "delete from blocks where key = ? and file = ?", (key, file)
            )
        )

    def _note(self, row: Row) -> None:
        """Enter a block that was found to lie there."""
        insert = "insert or replace into blocks values (?, ?, ?, ?)"
        self._changed(lambda index: index.execute(insert, row))

    def _changed(self, change: Callable[[sqlite3.Connection], object]) -> None:
        if self.writable:
            self._asked(lambda: self._index.change(change), None)

    def _asked(self, ask: Callable[[], Answer], otherwise: Answer) -> Answer:
        """What the index says; what it refuses is counted."""
        try:
            return ask()
        except (sqlite3.Error, OSError) as error:
            self._failed(error)
            return otherwise

    def _remove(self, files: list[str]) -> None:
        for file in files:
            if NAME.fullmatch(file):
                with suppress(OSError):
                    (self.path / "blocks" / file).unlink()


def _rows(path: Path) -> Iterator[Row]:
    """All blocks in a directory that say what they are."""
    for file in path.iterdir():
        if NAME.fullmatch(file.name):
            with suppress(OSError, ValueError):
                status, label = file.stat(), Label.read(_start(file))
                yield Row(label.key, file.name, status.st_size, status.st_mtime)


def _whole(file: Path) -> bytearray:
    """A block's bytes, in memory of their own: a file that is cut short meanwhile is an error.

    Raises:
        OSError: it cannot be read.
        MemoryError: it does not fit the free memory, of which none was taken.
        ValueError: it is no block.
    """
    with opened(file, follow=False) as handle:
        size = os.fstat(handle).st_size
        head = _header(handle, size)
        layout = Layout.read(head, HEADER_BYTES)
        if layout.nbytes != size or size > MOST_BYTES:
            raise ValueError(f"{size} bytes of {layout.nbytes}")
        if size > most_bytes():
            raise MemoryError(f"no memory for a block of {size} bytes")
        data = bytearray(size)
        read_into(handle, data, 0)
    return data


def _start(file: Path) -> bytes:
    """As many of a block's first bytes as have its label."""
    with opened(file, follow=False) as handle:
        size = os.fstat(handle).st_size
        head = _header(handle, size)
        layout = Layout.read(head, HEADER_BYTES)
        tokens = layout.entries.get("tokens")
        stop = len(head) + (0 if tokens is None else tokens.stop)
        if layout.nbytes != size or stop > len(head) + HEADER_BYTES:
            raise ValueError(f"{size} bytes of {layout.nbytes}, or its tokens lie elsewhere")
        data = bytearray(stop)
        read_into(handle, data, 0)
    return bytes(data)


def _header(handle: int, size: int) -> bytearray:
    first = bytearray(min(size, 8))
    read_into(handle, first, 0)
    head = bytearray(min(size, 8 + header_bytes(first, HEADER_BYTES)))
    read_into(handle, head, 0)
    return head


def _total(index: sqlite3.Connection) -> int:
    """Bytes of all files, of the rows that hold a number of bytes."""
    total = (
        "select coalesce(sum(nbytes), 0) from blocks "
        "where typeof(nbytes) = 'integer' and nbytes between 0 and ?"
    )
    return int(index.execute(total, (INDEXED_BYTES,)).fetchone()[0])


def _names(index: sqlite3.Connection) -> set[str]:
    return {name for (name,) in index.execute("select file from blocks")}


def _over(budget: int | None, index: sqlite3.Connection) -> list[str]:
    """Forget what was used longest ago until the rest fits; the files of that."""
    removed = list[str]()
    if budget is None or _total(index) <= budget:
        return removed
    all_rows = index.execute("select key, file, nbytes, used from blocks order by used")
    rows = [Row._make(row) for row in all_rows]
    total = sum(row.nbytes for row in rows if is_row(row))
    for row in rows:
        if is_row(row):
            if total <= budget:
                continue
            total -= row.nbytes
            removed.append(row.file)
        index.execute("delete from blocks where key = ?", (row.key,))
    return removed
