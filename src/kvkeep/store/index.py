"""Index: an SQLite table from block keys to files, rebuilt from the files when it is damaged."""

from __future__ import annotations

import fcntl
import os
import re
import sqlite3
import stat
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import NamedTuple, TypeVar
from urllib.parse import quote

from kvkeep.files.atomic import PRIVATE

NAME = re.compile(r"[0-9a-f]{32}\.safetensors")
"""The file names that an index may contain; files with other names are never touched."""

_TABLE = """
create table if not exists blocks (
    key text primary key, file text not null, nbytes integer not null, used real not null
) without rowid
"""
_COLUMNS = [("key", "TEXT"), ("file", "TEXT"), ("nbytes", "INTEGER"), ("used", "REAL")]
MOST_BYTES = 1 << 48  # of one file; keeps sums within SQLite's integers
_WAIT_S = 30.0  # for another process's transaction, or for another process that builds an index
_RETRY_S = 0.05
_BESIDE = ("-journal", "-wal", "-shm")  # suffixes of the files that SQLite opens beside an index
_DAMAGE = {
    sqlite3.SQLITE_ERROR,  # such as a missing table
    sqlite3.SQLITE_CORRUPT,
    sqlite3.SQLITE_MISMATCH,
    sqlite3.SQLITE_TOOBIG,
    sqlite3.SQLITE_FORMAT,
    sqlite3.SQLITE_NOTADB,
}
_INDEX = re.compile(r"index(?:\.(\d{1,9}))?\.sqlite")

Answer = TypeVar("Answer")


class Row(NamedTuple):
    """A block's key, the name and size (bytes) of its file, and its time of last use (seconds since
    1970)."""

    key: str
    file: str
    nbytes: int
    used: float


class _Stamp(NamedTuple):
    """Identifies the process and the index file of a connection, to detect a fork or a new
    index."""

    process: int
    file: Path
    inode: int | None


class Index:
    """A table of `Row` in a directory, safe for several threads and processes.

    A damaged index is rebuilt from `rows()` in a file with a higher number, and the damaged file is
    moved to `aside`. Its name is never reused, because SQLite finds the files that belong to an
    index by name: a process that has the old index open could delete those of the new one.

    Args:
        path: the directory.
        rows: lists all blocks in the directory.
        aside: the directory to which a damaged index is moved.
        writable: False leaves the directory unchanged.
    """

    def __init__(
        self, path: Path, rows: Callable[[], Iterable[Row]], aside: Path, *, writable: bool
    ) -> None:
        self.writable = writable
        self._path, self._rows, self._aside = path, rows, aside
        self._local = threading.local()
        self._inherited: list[sqlite3.Connection] = []
        self._locked_until = 0.0

    def ask(self, question: Callable[[sqlite3.Connection], Answer]) -> Answer:
        """Return `question(connection)`; if the index is damaged, rebuild it and try once more.

        Raises:
            sqlite3.Error, OSError: the index cannot be read.
        """
        try:
            return self._run(question)
        except sqlite3.Error as error:
            if not _is_damage(error):
                raise
        self._repair()
        return self._run(question)

    def change(self, change: Callable[[sqlite3.Connection], Answer]) -> Answer:
        """Like `ask`, in a transaction."""

        def question(index: sqlite3.Connection) -> Answer:
            with index:
                index.execute("begin immediate")
                return change(index)

        return self.ask(question)

    def require_sound(self) -> None:
        """Check the whole index and rebuild it if it is damaged.

        Raises:
            sqlite3.Error, OSError: the index cannot be opened.
        """
        if not self.ask(_is_sound):
            self._repair()

    def leftovers(self) -> Iterator[Path]:
        """SQLite's auxiliary files of indexes that no longer exist."""
        for file in self._path.glob("index*.sqlite-*"):
            main = file.name.rpartition("-")[0]
            if _INDEX.fullmatch(main) and not os.path.lexists(self._path / main):
                yield file

    def _run(self, question: Callable[[sqlite3.Connection], Answer]) -> Answer:
        with _sqlite_errors():
            return question(self._connection())

    def _connection(self) -> sqlite3.Connection:
        """This thread's connection. A forked child opens its own, and a connection to a replaced
        index is opened again."""
        held: tuple[_Stamp, sqlite3.Connection] | None = getattr(self._local, "held", None)
        if held is not None and held[0] == self._stamp():
            if held[1].in_transaction:  # an interrupt left it open
                held[1].rollback()
            return held[1]
        if held is not None and held[0].process != os.getpid():
            self._inherited.append(held[1])  # kept: a child must not close its parent's connection
        self._local.held = None
        index = self._open() if self.writable else self._open_read_only()
        self._local.held = (self._stamp(), index)
        return index

    def _stamp(self) -> _Stamp:
        file, inode = self._current(), None
        with suppress(FileNotFoundError):
            inode = os.lstat(file).st_ino
        return _Stamp(os.getpid(), file, inode)

    def _current(self) -> Path:
        """The path of the index: the existing file with the highest number, or of a first one."""
        known: Path | None = getattr(self._local, "current", None)
        if known is None or not os.path.lexists(known):
            there = [name for name in os.listdir(self._path) if _INDEX.fullmatch(name)]
            last = max(there, key=_number, default="index.sqlite")
            known = self._local.current = self._path / last
        return known

    def _open(self) -> sqlite3.Connection:
        file = self._current()
        if not _is_file(file):
            if os.path.lexists(file):
                raise sqlite3.DatabaseError(f"{file} is not an index")  # no code: counts as damage
            self._repair()
            file = self._current()
        _require_files_beside(file)
        index = sqlite3.connect(file, timeout=_WAIT_S, isolation_level=None)
        try:
            index.execute("pragma journal_mode = wal")
            index.execute("pragma synchronous = normal")
        except BaseException:
            index.close()
            raise
        return index

    def _open_read_only(self) -> sqlite3.Connection:
        """A read-only connection. If SQLite cannot create its files beside the index, the index is
        opened as immutable; if that fails too, an index in memory is built from the blocks."""
        file = self._current()
        if _is_file(file):
            for option in ("mode=ro", "immutable=1"):
                index = None
                with suppress(sqlite3.Error), _sqlite_errors():
                    if option == "mode=ro":
                        _require_files_beside(file)
                    place = f"file:{quote(str(file))}?{option}"
                    index = sqlite3.connect(place, uri=True, timeout=_WAIT_S, isolation_level=None)
                    if _is_sound(index):
                        return index
                if index is not None:
                    index.close()
        index = sqlite3.connect(":memory:", isolation_level=None)
        self._fill(index)
        return index

    def _repair(self) -> None:
        """Rebuild the index from the blocks, unless another process has just done so."""
        held: tuple[_Stamp, sqlite3.Connection] | None = getattr(self._local, "held", None)
        self._local.held = self._local.current = None
        if held is not None and held[0].process == os.getpid():
            held[1].close()
        if not self.writable:
            return
        with self._build_lock():
            file = self._current()
            if _is_file(file) and self._is_sound(file):
                return
            new = self._path / f"index.{uuid.uuid4().hex}.new"
            try:
                new.touch(PRIVATE, exist_ok=False)
                with closing(sqlite3.connect(new, isolation_level=None)) as index:
                    self._fill(index)
                first = not os.path.lexists(file)
                following = self._path / f"index.{_number(file.name) + 1}.sqlite"
                new.rename(file if first else following)
            except BaseException:
                new.unlink(missing_ok=True)
                raise
            if not first:
                with suppress(OSError):
                    file.rename(self._aside / f"{uuid.uuid4().hex}.sqlite")
            self._local.held = self._local.current = None

    def _is_sound(self, file: Path) -> bool:
        """Whether an index that another process may have built is sound."""
        try:
            _require_files_beside(file)
            with (
                closing(sqlite3.connect(file, timeout=_WAIT_S, isolation_level=None)) as index,
                _sqlite_errors(),
            ):
                return _is_sound(index)
        except sqlite3.Error as error:
            if not _is_damage(error):
                raise
            return False

    def _fill(self, index: sqlite3.Connection) -> None:
        index.execute("begin")
        index.execute(_TABLE)
        index.executemany("insert or ignore into blocks values (?, ?, ?, ?)", self._rows())
        index.execute("commit")

    @contextmanager
    def _build_lock(self) -> Iterator[None]:
        """Hold the lock under which an index is built.

        Raises:
            TimeoutError: another thread or process held the lock for `_WAIT_S` seconds. For the
                same time afterwards, calls fail at once instead of waiting.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        place = self._path / "index.lock"
        with FileIO(place, "r+b", opener=lambda path, _: os.open(path, flags, PRIVATE)) as file:
            self._lock(file.fileno())
            yield

    def _lock(self, handle: int) -> None:
        start = time.monotonic()
        until = start if start < self._locked_until else start + _WAIT_S
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError as error:
                if time.monotonic() >= until:
                    if until > start:
                        self._locked_until = until + _WAIT_S
                    raise TimeoutError(
                        f"another thread or process held index.lock for {_WAIT_S} s"
                    ) from error
            time.sleep(_RETRY_S)


def _require_files_beside(index: Path) -> None:
    """Raise DatabaseError, which counts as damage, if one of SQLite's auxiliary files is not a
    regular file: opening a FIFO would block, and links would be followed."""
    for end in _BESIDE:
        with suppress(FileNotFoundError):
            if not stat.S_ISREG(os.lstat(f"{index}{end}").st_mode):
                # It has no error code, so it counts as damage.
                raise sqlite3.DatabaseError(f"{index}{end} is not a regular file")


def _number(name: str) -> int:
    """The number in an index's file name; 0 without one."""
    found = _INDEX.fullmatch(name)
    return int(found[1] or 0) if found else 0


def _is_file(path: Path) -> bool:
    """Whether `path` is a regular file and not empty. SQLite treats an empty file as a new index,
    but blocks while a process that opened it before it was emptied holds a lock."""
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return False
    return stat.S_ISREG(status.st_mode) and status.st_size > 0


def _is_sound(index: sqlite3.Connection) -> bool:
    """Whether the database passes SQLite's check and is a valid table of `Row`."""
    if index.execute("pragma quick_check(1)").fetchall() != [("ok",)]:
        return False
    columns = [(row[1], row[2].upper()) for row in index.execute("pragma table_info(blocks)")]
    if columns != _COLUMNS:
        return False
    rows = map(Row._make, index.execute("select * from blocks"))
    return not [row for row in rows if not is_row(row)]  # reads all rows: invalid text raises


def is_row(row: Row) -> bool:
    """Whether each column has the right type and range; SQLite itself does not enforce them."""
    return (
        isinstance(row.key, str)
        and isinstance(row.file, str)
        and NAME.fullmatch(row.file) is not None
        and isinstance(row.nbytes, int)
        and 0 <= row.nbytes <= MOST_BYTES
        and isinstance(row.used, float)
    )


@contextmanager
def _sqlite_errors() -> Iterator[None]:
    """Turn other exceptions that the `sqlite3` module raises into `sqlite3.Error`."""
    try:
        yield
    except UnicodeError as error:  # from a message that quotes bytes of a damaged file
        raise sqlite3.DatabaseError(f"invalid text: {error}") from error
    except MemoryError as error:
        raise sqlite3.InterfaceError("not enough memory to read the index") from error


def _is_damage(error: sqlite3.Error) -> bool:
    """Whether an error means that the index is damaged, not busy, full or locked."""
    if isinstance(error, (sqlite3.ProgrammingError, sqlite3.InterfaceError)):
        return False
    code = getattr(error, "sqlite_errorcode", None)
    return code is None or code & 0xFF in _DAMAGE
