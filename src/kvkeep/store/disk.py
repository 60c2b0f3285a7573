"""Disk: blocks as immutable files, found by an SQLite index; for several processes at once."""

from __future__ import annotations

import os
import sqlite3
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import ClassVar, final

from safetensors import SafetensorError, safe_open

from kvkeep import tensorfile
from kvkeep.errors import SpecError
from kvkeep.store.backend import (
    ABANDONED_S,
    LABEL_BYTES,
    Backend,
    Block,
    Label,
    require_budget,
)

_TABLE = """
create table if not exists blocks (
    key text primary key, file text not null, nbytes integer not null, used real not null
) without rowid
"""
_WAIT_S = 30.0  # for another process's transaction


@final
class Disk(Backend):
    """A directory: `index.sqlite` in WAL mode, `blocks/` with one safetensors file for each, and
    `quarantine/` with those that were found damaged.

    A file is written whole before the index names it and is never changed, and it is forgotten by
    the index before it is removed: whoever is killed leaves at most a file that nobody names, which
    `gc` removes.

    Args:
        path: the directory; made if it is not there.
        budget: most bytes of files; those used longest ago go first. None: as many as come.

    Raises:
        SpecError: a budget below 1, or a path that is no directory.
    """

    name: ClassVar[str] = "disk"

    def __init__(self, path: str | os.PathLike[str], budget: int | None = None) -> None:
        self.path = Path(path)
        require_budget(budget)
        if self.path.exists() and not self.path.is_dir():
            raise SpecError(f"{self.path} is no directory; give one, or a path for a new one")
        self.budget = budget
        for part in ("blocks", "new", "quarantine"):
            (self.path / part).mkdir(parents=True, exist_ok=True)
        self._local = threading.local()
        with self._transaction() as index:
            index.execute(_TABLE)

    def get(self, key: str, *, used: bool = True) -> Block | None:
        file = self._file(key)
        if file is None:
            return None
        try:
            with safe_open(file, framework="pt") as opened:
                tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
                block = Block.read(tensors, opened.metadata() or {})
            if block.key != key:
                raise ValueError("it is another block")
        except FileNotFoundError:  # removed by another process meanwhile, or by hand
            self._forget(key, file)
            return None
        except (SafetensorError, OSError, ValueError, RuntimeError):
            self.damaged += 1
            self._forget(key, file)
            with suppress(OSError):
                file.replace(self.path / "quarantine" / file.name)
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
        file = self.path / "blocks" / f"{uuid.uuid4().hex}.safetensors"
        new = self.path / "new" / file.name
        try:
            tensorfile.write(new, block.tensors(), block.metadata(), sync=False)
            size = new.stat().st_size
            new.replace(file)
            row = (block.key, file.name, size, time.time())
            with self._transaction() as index:
                done = index.execute("insert or ignore into blocks values (?, ?, ?, ?)", row)
                removed = self._over(self.budget, index) if done.rowcount else [file.name]
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
            self._forget(key, file)
            self._remove([file.name])

    def scan(self, prefix: str = "") -> Iterator[str]:
        keys: list[str] = []
        with self._tried():
            found = self._index().execute(
                "select key from blocks where key >= ? and key < ?", (prefix, prefix + "\U0010ffff")
            )
            keys = [key for (key,) in found]
        return iter(keys)

    def labels(self, keys: Sequence[str]) -> list[Label | None]:
        return [self._label(key, self._first_bytes(key)) for key in keys]

    @property
    def nbytes(self) -> int:
        """Bytes of all files that are named."""
        total = self._index().execute("select coalesce(sum(nbytes), 0) from blocks").fetchone()[0]
        return int(total)

    def gc(self, older_than: float = ABANDONED_S, budget: int | None = None) -> int:
        require_budget(budget)
        freed = 0
        if budget is not None:
            before = self.nbytes
            with self._transaction() as index:
                removed = self._over(budget, index)
            self._remove(removed)
            freed = before - self.nbytes
        named = {name for (name,) in self._index().execute("select file from blocks")}
        abandoned = time.time() - older_than
        for file in self.path.glob("*/*.safetensors"):
            with suppress(OSError):
                status = file.stat()
                if file.name not in named and status.st_mtime <= abandoned:
                    file.unlink()
                    freed += status.st_size
        return freed

    def _use(self, keys: Sequence[str]) -> None:
        """Note that blocks of one prompt were used; its end goes before what it begins with."""
        rows = [(time.time() - 1e-5 * index, key) for index, key in enumerate(keys)]
        if rows:
            with self._tried(), self._transaction() as index:
                index.executemany("update blocks set used = ? where key = ?", rows)

    def _file(self, key: str) -> Path | None:
        row = None
        with self._tried():
            row = self._index().execute("select file from blocks where key = ?", (key,)).fetchone()
        return None if row is None else self.path / "blocks" / row[0]

    def _first_bytes(self, key: str) -> bytes | None:
        file = self._file(key)
        if file is None:
            return None
        try:
            with file.open("rb") as opened:
                return opened.read(LABEL_BYTES)
        except OSError:
            return b""

    @contextmanager
    def _tried(self) -> Iterator[None]:
        """Count what the index refuses, and go on."""
        try:
            yield
        except sqlite3.Error as error:
            self._failed(error)

    def _forget(self, key: str, file: Path) -> None:
        with self._tried(), self._transaction() as index:
            index.execute("delete from blocks where key = ? and file = ?", (key, file.name))

    def _over(self, budget: int | None, index: sqlite3.Connection) -> list[str]:
        """Forget what was used longest ago until the rest fits; the files of that."""
        total = index.execute("select coalesce(sum(nbytes), 0) from blocks").fetchone()[0]
        removed: list[str] = []
        if budget is None or total <= budget:
            return removed
        for key, file, size in index.execute(
            "select key, file, nbytes from blocks order by used"
        ).fetchall():
            if total <= budget:
                break
            index.execute("delete from blocks where key = ?", (key,))
            total -= size
            removed.append(file)
        return removed

    def _remove(self, files: list[str]) -> None:
        for file in files:
            with suppress(OSError):
                (self.path / "blocks" / file).unlink()

    def _index(self) -> sqlite3.Connection:
        """This thread's connection; a forked child opens its own."""
        held: tuple[int, sqlite3.Connection] | None = getattr(self._local, "held", None)
        if held is None or held[0] != os.getpid():
            index = sqlite3.connect(
                self.path / "index.sqlite", timeout=_WAIT_S, isolation_level=None
            )
            index.execute("pragma journal_mode = wal")
            index.execute("pragma synchronous = normal")
            held = self._local.held = (os.getpid(), index)
        return held[1]

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        index = self._index()
        index.execute("begin immediate")
        try:
            yield index
        except BaseException:
            index.execute("rollback")
            raise
        index.execute("commit")
