"""Disk: blocks as immutable files with an SQLite index, which several processes can share."""

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
from kvkeep.files.atomic import PRIVATE_DIRECTORY
from kvkeep.files.tensor_file import Layout, header_bytes
from kvkeep.reading import NoFileError, opened, read_into
from kvkeep.store.backend import (
    ABANDONED_S,
    HEADER_BYTES,
    MOST_BYTES,
    Backend,
    Label,
    OtherBlockError,
    StoredBlock,
    is_key,
    most_bytes,
    require_budget,
)
from kvkeep.store.index import MOST_BYTES as INDEXED_BYTES
from kvkeep.store.index import NAME, Index, Row, is_row

_PARTS = ("blocks", "new", "quarantine")
_DELETE = "delete from blocks where key = ? and file = ?"
_REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS)

Answer = TypeVar("Answer")


@final
class Disk(Backend):
    """A directory with `index.sqlite` in WAL mode, `blocks/` with one safetensors file per block,
    and `quarantine/` with damaged files.

    A file is complete before it is entered in the index, is never changed, and is deleted before it
    is removed from the index, which needs space on the disk. So a process that is killed leaves at
    most unreferenced files, which `gc` removes, and entries without a file, which are removed when
    they are next looked up or evicted, and by `gc`. Files are readable by their owner only. A
    damaged index is rebuilt from the blocks. A directory without write permission is used
    read-only.

    Args:
        path: the directory; created if it does not exist.
        budget: most bytes of block files; the least recently used are removed first. None: no
            limit.

    Raises:
        SpecError: the budget is below 1, or the path is not a directory and none can be created
            there.
    """

    name: ClassVar[str] = "disk"

    def __init__(self, path: str | os.PathLike[str], budget: int | None = None) -> None:
        self.path = Path(path)
        require_budget(budget)
        self.budget = budget
        writable = self._make_directories()
        rows = partial(_rows, self.path / "blocks")
        self._index = Index(self.path, rows, self.path / "quarantine", writable=writable)
        self._ask(self._index.require_sound, None)

    @property
    def writable(self) -> bool:
        """Whether blocks can be written here."""
        return self._index.writable

    def get(self, key: str, *, used: bool = True) -> StoredBlock | None:
        file = self._file(key)
        if file is None:
            return None
        try:
            block = StoredBlock.from_bytes(_read_block(file), key)
        except FileNotFoundError:  # removed meanwhile by another process or by the user
            self._delete_row(key, file.name)
            return None
        except OtherBlockError as error:  # the index is wrong, not the block
            self.damaged += 1
            with suppress(OSError):
                self._add_row(Row(str(error), file.name, file.stat().st_size, time.time()))
            self._delete_row(key, file.name)
            return None
        except (NoFileError, ValueError):
            self._quarantine_file(key, file)
            return None
        except (OSError, MemoryError) as error:  # the block itself may be intact
            self._failed(error)
            return None
        if used:
            self._record_use([key])
        return block

    def leading(self, keys: Sequence[str]) -> list[StoredBlock]:
        found: list[StoredBlock] = []
        for key in keys:
            block = self.get(key, used=False)
            if block is None:
                break
            found.append(block)
        self._record_use(keys[: len(found)])
        return found

    def put_all(self, blocks: Iterable[StoredBlock]) -> int:
        kept = [block.key for block in blocks if self.put(block)]
        self._record_use(kept)
        return len(kept)

    def put(self, block: StoredBlock) -> bool:
        if self.contains(block.key):
            return True
        if not self.writable:
            self._failed(PermissionError(f"no permission to write to {self.path}"))
            return False
        tensors, metadata = block.tensors(), block.metadata()
        size = tensor_file.size(tensors, metadata)
        if self.budget is not None:
            if size > self.budget:
                return False
            self._fit(self.budget - size)
        file = self.path / "blocks" / f"{uuid.uuid4().hex}.safetensors"
        new = self.path / "new" / file.name
        row = Row(block.key, file.name, size, time.time())

        def enter(index: sqlite3.Connection) -> bool:
            insert = "insert or ignore into blocks values (?, ?, ?, ?)"
            entered = index.execute(insert, row).rowcount > 0
            if entered and self.budget is not None:  # other processes put blocks meanwhile
                rows = _beyond(self.budget, index)
                for _, other in rows:
                    self._remove(other)
                index.executemany(_DELETE, rows)
            return entered

        try:
            tensor_file.write(new, tensors, metadata, sync=False, private=True)
            new.replace(file)
            if not self._index.change(enter):  # another process entered the same block
                file.unlink()
        except BaseException as error:
            for left in (new, file):
                with suppress(OSError):
                    left.unlink()
            if not isinstance(error, (OSError, sqlite3.Error)):
                self._delete_row(block.key, file.name)  # it may have been entered
                raise
            self._failed(error)
            return False
        return True

    def contains(self, key: str) -> bool:
        return self._file(key) is not None

    def delete(self, key: str) -> None:
        file = self._file(key)
        if file is not None:
            self._remove(file.name)
            self._delete_row(key, file.name)

    def quarantine(self, key: str) -> None:
        file = self._file(key)
        if file is None:
            self.damaged += 1
        else:
            self._quarantine_file(key, file)

    def scan(self, prefix: str = "") -> Iterator[str]:
        def keys(index: sqlite3.Connection) -> list[str]:
            found = index.execute(
                "select key from blocks where key >= ? and key < ?", (prefix, prefix + "\U0010ffff")
            )
            return [key for (key,) in found if is_key(key)]

        nothing: list[str] = []
        return iter(self._ask(lambda: self._index.ask(keys), nothing))

    def labels(self, keys: Sequence[str]) -> list[Label | None]:
        return [self._label(key, self._first_bytes(key)) for key in keys]

    def exists(self) -> bool:
        return True

    @property
    def nbytes(self) -> int:
        """Bytes of all files in the index."""
        return self._ask(lambda: self._index.ask(_total), 0)

    def gc(self, older_than: float = ABANDONED_S, budget: int | None = None) -> int:
        require_budget(budget)
        if not self.writable:
            self._failed(PermissionError(f"no permission to write to {self.path}"))
            return 0
        freed = self._fit(budget)
        self._forget_missing()
        named = self._ask(lambda: self._index.ask(_names), None)
        if named is None:  # the index cannot be read, so abandoned files cannot be told apart
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

    def _make_directories(self) -> bool:
        """Create the directories that do not exist; returns whether all are writable."""
        if os.path.exists(self.path) and not os.path.isdir(self.path):
            raise SpecError(
                f"{self.path} is not a directory; give a directory or the path of a new one"
            )
        writable = True
        try:
            self.path.mkdir(mode=PRIVATE_DIRECTORY, parents=True, exist_ok=True)
            for part in _PARTS:
                (self.path / part).mkdir(mode=PRIVATE_DIRECTORY, exist_ok=True)
        except OSError as error:
            writable = False
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
        places = [self.path, *(self.path / part for part in _PARTS)]
        return writable and all(os.access(place, os.W_OK | os.X_OK) for place in places)

    def _files(self, part: str) -> list[Path]:
        """The files in one of the subdirectories."""
        try:
            return list((self.path / part).iterdir())
        except OSError as error:
            self._failed(error)
            return []

    def _record_use(self, keys: Sequence[str]) -> None:
        """Record that a prompt's blocks were used. Later blocks get slightly older times, so that a
        prompt is evicted from its end."""
        rows = [(time.time() - 1e-5 * index, key) for index, key in enumerate(keys)]
        if rows and self.writable:
            update = "update blocks set used = ? where key = ?"
            self._change(lambda index: index.executemany(update, rows))

    def _file(self, key: str) -> Path | None:
        """The block's file according to the index, if the entry is a valid file name."""

        def row(index: sqlite3.Connection) -> tuple[object] | None:
            found = index.execute("select file from blocks where key = ?", (key,)).fetchone()
            return cast("tuple[object] | None", found)

        found = self._ask(lambda: self._index.ask(row), None) if is_key(key) else None
        if found is None:
            return None
        (name,) = found
        if not isinstance(name, str) or not NAME.fullmatch(name):
            self.damaged += 1
            self._change(lambda index: index.execute("delete from blocks where key = ?", (key,)))
            return None
        return self.path / "blocks" / name

    def _first_bytes(self, key: str) -> bytes | None:
        file = self._file(key)
        if file is None:
            return None
        try:
            return _read_label(file)
        except (OSError, ValueError):
            return b""

    def _quarantine_file(self, key: str, file: Path) -> None:
        self.damaged += 1
        with suppress(OSError):
            file.replace(self.path / "quarantine" / file.name)
        self._delete_row(key, file.name)

    def _delete_row(self, key: str, file: str) -> None:
        self._delete_rows([(key, file)])

    def _delete_rows(self, rows: Sequence[tuple[object, object]]) -> None:
        """Delete index entries, each given by its key and file."""
        if rows:
            self._change(lambda index: index.executemany(_DELETE, rows))

    def _add_row(self, row: Row) -> None:
        """Add or replace an index entry for a block that was found on disk."""
        insert = "insert or replace into blocks values (?, ?, ?, ?)"
        self._change(lambda index: index.execute(insert, row))

    def _change(self, change: Callable[[sqlite3.Connection], object]) -> None:
        if self.writable:
            self._ask(lambda: self._index.change(change), None)

    def _ask(self, ask: Callable[[], Answer], otherwise: Answer) -> Answer:
        """Return `ask()`, or `otherwise` after counting an error of the index."""
        try:
            return ask()
        except (sqlite3.Error, OSError) as error:
            self._failed(error)
            return otherwise

    def _fit(self, budget: int | None) -> int:
        """Remove the least recently used blocks until the rest fits a budget; returns the bytes
        freed. If the index cannot be read, for example because it needs space on a full disk, the
        blocks that were written first are removed."""
        if budget is None:
            return 0
        rows = self._ask(lambda: self._index.ask(partial(_beyond, budget)), None)
        if rows is not None:
            freed = sum(self._remove(file) for _, file in rows)
            self._delete_rows(rows)
            return freed
        found = list[tuple[float, str, int]]()
        for file in self._files("blocks"):
            with suppress(OSError):
                status = file.lstat()
                found.append((status.st_mtime, file.name, status.st_size))
        over, freed = sum(size for *_, size in found) - budget, 0
        for _, name, _ in sorted(found):
            if freed >= over:
                break
            freed += self._remove(name)
        if freed:
            self._forget_missing()
        return freed

    def _forget_missing(self) -> None:
        """Delete the index entries whose files are gone."""
        rows = self._ask(lambda: self._index.ask(_files_by_key), None)
        there = self._ask(lambda: set(os.listdir(self.path / "blocks")), None)  # rows come first
        if rows is not None and there is not None:
            self._delete_rows([row for row in rows if row[1] not in there])

    def _remove(self, file: object) -> int:
        """Delete a block's file, if the name is one; returns the bytes freed."""
        if isinstance(file, str) and NAME.fullmatch(file):
            with suppress(OSError):
                path = self.path / "blocks" / file
                size = path.lstat().st_size
                path.unlink()
                return size
        return 0


def _rows(path: Path) -> Iterator[Row]:
    """Index rows for all blocks in a directory whose labels can be read."""
    for file in path.iterdir():
        if NAME.fullmatch(file.name):
            with suppress(OSError, ValueError):
                status, label = file.stat(), Label.read(_read_label(file))
                yield Row(label.key, file.name, status.st_size, status.st_mtime)


def _read_block(file: Path) -> bytearray:
    """Read a block's bytes into memory. The file is not mapped, so that truncating it meanwhile
    gives an error, not a crash.

    Raises:
        OSError: the file cannot be read.
        MemoryError: the file does not fit in free memory; nothing was allocated.
        ValueError: the file is not a block.
    """
    with opened(file, follow=False) as handle:
        size = os.fstat(handle).st_size
        head = _read_header(handle, size)
        layout = Layout.read(head, HEADER_BYTES)
        if layout.nbytes != size or size > MOST_BYTES:
            raise ValueError(f"{size} bytes, but the header describes {layout.nbytes}")
        if size > most_bytes():
            raise MemoryError(f"a block of {size} bytes does not fit in free memory")
        data = bytearray(size)
        read_into(handle, data, 0)
    return data


def _read_label(file: Path) -> bytes:
    """Read the first bytes of a block, as many as its label needs."""
    with opened(file, follow=False) as handle:
        size = os.fstat(handle).st_size
        head = _read_header(handle, size)
        layout = Layout.read(head, HEADER_BYTES)
        tokens = layout.entries.get("tokens")
        stop = len(head) + (0 if tokens is None else tokens.stop)
        if layout.nbytes != size or stop > len(head) + HEADER_BYTES:
            raise ValueError(
                f"{size} bytes, but the header describes {layout.nbytes}, or the tokens do not "
                "follow the header"
            )
        data = bytearray(stop)
        read_into(handle, data, 0)
    return bytes(data)


def _read_header(handle: int, size: int) -> bytearray:
    first = bytearray(min(size, 8))
    read_into(handle, first, 0)
    head = bytearray(min(size, 8 + header_bytes(first, HEADER_BYTES)))
    read_into(handle, head, 0)
    return head


def _total(index: sqlite3.Connection) -> int:
    """Bytes of all files, counting only rows with a valid size."""
    total = (
        "select coalesce(sum(nbytes), 0) from blocks "
        "where typeof(nbytes) = 'integer' and nbytes between 0 and ?"
    )
    return int(index.execute(total, (INDEXED_BYTES,)).fetchone()[0])


def _names(index: sqlite3.Connection) -> set[str]:
    return {name for (name,) in index.execute("select file from blocks")}


def _files_by_key(index: sqlite3.Connection) -> list[tuple[object, object]]:
    return index.execute("select key, file from blocks").fetchall()


def _beyond(budget: int, index: sqlite3.Connection) -> list[tuple[object, object]]:
    """The keys and files of the least recently used rows without which the rest fits the budget,
    and then of invalid rows too."""
    found = list[tuple[object, object]]()
    if _total(index) <= budget:
        return found
    all_rows = index.execute("select key, file, nbytes, used from blocks order by used")
    rows = [Row._make(row) for row in all_rows]
    total = sum(row.nbytes for row in rows if is_row(row))
    for row in rows:
        if is_row(row):
            if total <= budget:
                continue
            total -= row.nbytes
        found.append((row.key, row.file))
    return found
