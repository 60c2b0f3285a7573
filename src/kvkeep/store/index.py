"""Index: which file of a directory has which block, in SQLite; made again when it is damaged."""

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
from pathlib import Path
from typing import NamedTuple, TypeVar
from urllib.parse import quote

from kvkeep.files.atomic import PRIVATE

NAME = re.compile(r"[0-9a-f]{32}\.safetensors")
"""The names of files that an index may speak of: no others are touched."""

_TABLE = """
create table if not exists blocks (
    key text primary key, file text not null, nbytes integer not null, used real not null
) without rowid
"""
_COLUMNS = [("key", "TEXT"), ("file", "TEXT"), ("nbytes", "INTEGER"), ("used", "REAL")]
MOST_BYTES = 1 << 48  # of a file, and as sums are kept
_WAIT_S = 30.0  # for another process's transaction, or until it has made an index
_RETRY_S = 0.05
_BESIDE = ("-journal", "-wal", "-shm")  # files that SQLite opens beside an index, by name
_DAMAGE = {
    sqlite3.SQLITE_ERROR,  # such as a table that is not there
    sqlite3.SQLITE_CORRUPT,
    sqlite3.SQLITE_MISMATCH,
    sqlite3.SQLITE_TOOBIG,
    sqlite3.SQLITE_FORMAT,
    sqlite3.SQLITE_NOTADB,
}
_INDEX = re.compile(r"index(?:\.(\d{1,9}))?\.sqlite")

Answer = TypeVar("Answer")


class Row(NamedTuple):
    """A block: its key, the name and the size of its file, and when it was used last, in seconds
    since 1970."""

    key: str
    file: str
    nbytes: int
    used: float


class _Stamp(NamedTuple):
    """What differs between two indexes, and between two processes that have one open."""

    process: int
    file: Path
    inode: int | None


class Index:
    """A table of `Row` in a directory, for several threads and processes at once.

    Where it is damaged it is made again, of what `rows` finds, in a file of a higher number; the
    damaged one is moved to `aside`. The old name is never used again: SQLite removes what belongs
    to a file by its name, also for a process that has the old one open.

    Args:
        path: the directory.
        rows: all blocks that lie there.
        aside: where to a damaged index is moved.
        writable: False leaves the directory as it is.
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
        """What a question gives; it is asked again once a damaged index was made again.

        Raises:
            sqlite3.Error, OSError: it cannot be asked.
        """
        try:
            return self._asked(question)
        except sqlite3.Error as error:
            if not _is_damage(error):
                raise
        self._repair()
        return self._asked(question)

    def change(self, change: Callable[[sqlite3.Connection], Answer]) -> Answer:
        """`ask`, in a transaction."""

        def question(index: sqlite3.Connection) -> Answer:
            index.execute("begin immediate")
            try:
                answer = change(index)
                index.execute("commit")
            except BaseException:
                with suppress(sqlite3.Error):
                    index.execute("rollback")
                raise
            return answer

        return self.ask(question)

    def require_sound(self) -> None:
        """Look at all of it, and make it again where it is damaged.

        Raises:
            sqlite3.Error, OSError: it cannot be opened.
        """
        if not self.ask(_is_sound):
            self._repair()

    def leftovers(self) -> Iterator[Path]:
        """What belongs to indexes that are no more."""
        for file in self._path.glob("index*.sqlite-*"):
            main = file.name.rpartition("-")[0]
            if _INDEX.fullmatch(main) and not os.path.lexists(self._path / main):
                yield file

    def _asked(self, question: Callable[[sqlite3.Connection], Answer]) -> Answer:
        with _sqlite_errors():
            return question(self._connection())

    def _connection(self) -> sqlite3.Connection:
        """This thread's; a forked child opens its own, and who sees another index opens that."""
        held: tuple[_Stamp, sqlite3.Connection] | None = getattr(self._local, "held", None)
        if held is not None and held[0] == self._stamp():
            return held[1]
        if held is not None and held[0].process != os.getpid():
            self._inherited.append(held[1])  # which SQLite wants never to be closed here
        self._local.held = None
        index = self._opened() if self.writable else self._opened_to_read()
        self._local.held = (self._stamp(), index)
        return index

    def _stamp(self) -> _Stamp:
        file, inode = self._current(), None
        with suppress(FileNotFoundError):
            inode = os.lstat(file).st_ino
        return _Stamp(os.getpid(), file, inode)

    def _current(self) -> Path:
        """Where the index lies, or is to: the one of the highest number."""
        known: Path | None = getattr(self._local, "current", None)
        if known is None or not os.path.lexists(known):
            there = [name for name in os.listdir(self._path) if _INDEX.fullmatch(name)]
            last = max(there, key=_number, default="index.sqlite")
            known = self._local.current = self._path / last
        return known

    def _opened(self) -> sqlite3.Connection:
        file = self._current()
        if not _is_file(file):
            if os.path.lexists(file):
                raise sqlite3.DatabaseError(f"{file} is no index")  # no code, so it is damage
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

    def _opened_to_read(self) -> sqlite3.Connection:
        """Where SQLite can make no file beside the index it reads it as it is, and where there is
        none that it can read, the blocks are listed."""
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
        """Make the index of what there is, unless another process just did."""
        held: tuple[_Stamp, sqlite3.Connection] | None = getattr(self._local, "held", None)
        self._local.held = self._local.current = None
        if held is not None and held[0].process == os.getpid():
            held[1].close()
        if not self.writable:
            return
        with self._alone():
            file = self._current()
            if _is_file(file) and self._is_sound(file):
                return
            new = self._path / f"index.{uuid.uuid4().hex}.new"
            os.close(os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, PRIVATE))
            try:
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
        """Whether another process's index is a good one."""
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
    def _alone(self) -> Iterator[None]:
        """While no other thread or process makes an index here.

        Raises:
            TimeoutError: another holds the lock for too long; for as long again nobody waits.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        handle = os.open(self._path / "index.lock", flags, PRIVATE)
        try:
            self._lock(handle)
            yield
        finally:
            os.close(handle)

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
                    raise TimeoutError(f"index.lock is held by another for {_WAIT_S} s") from error
            time.sleep(_RETRY_S)


def _require_files_beside(index: Path) -> None:
    """Raise DatabaseError, as for damage, where SQLite would open what is no file: it waits for
    whoever writes to a FIFO, and follows links."""
    for end in _BESIDE:
        with suppress(FileNotFoundError):
            if not stat.S_ISREG(os.lstat(f"{index}{end}").st_mode):
                raise sqlite3.DatabaseError(f"{index}{end} is no file")  # no code, so it is damage


def _number(name: str) -> int:
    """Of an index, by its name."""
    found = _INDEX.fullmatch(name)
    return int(found[1] or 0) if found else 0


def _is_file(path: Path) -> bool:
    """Whether a file lies there, in which something is: SQLite takes an empty one for a new index,
    but waits for whoever has it open since before it was emptied."""
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return False
    return stat.S_ISREG(status.st_mode) and status.st_size > 0


def _is_sound(index: sqlite3.Connection) -> bool:
    """Whether SQLite finds nothing wrong with it, and it is a table of rows."""
    if index.execute("pragma quick_check(1)").fetchall() != [("ok",)]:
        return False
    columns = [(row[1], row[2].upper()) for row in index.execute("pragma table_info(blocks)")]
    if columns != _COLUMNS:
        return False
    rows = map(Row._make, index.execute("select * from blocks"))
    return not [row for row in rows if not is_row(row)]  # all are read: some may be no text


def is_row(row: Row) -> bool:
    """Whether each column is what it should be; SQLite holds anything in any."""
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
    """Raise what SQLite's module raises beside its own errors as one of them."""
    try:
        yield
    except UnicodeError as error:  # of a message, in which a damaged file is quoted
        raise sqlite3.DatabaseError(f"no text: {error}") from error
    except MemoryError as error:
        raise sqlite3.InterfaceError("no memory to read an index") from error


def _is_damage(error: sqlite3.Error) -> bool:
    """Whether an index that gives such an error is no good; others are busy, full or locked."""
    if isinstance(error, (sqlite3.ProgrammingError, sqlite3.InterfaceError)):
        return False
    code = getattr(error, "sqlite_errorcode", None)
    return code is None or code & 0xFF in _DAMAGE
