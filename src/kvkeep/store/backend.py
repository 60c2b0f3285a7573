"""Backend: storage for blocks of tokens outside the process."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from math import inf
from typing import Any, ClassVar, TypeVar

import torch

from kvkeep.errors import SpecError
from kvkeep.storage.allocate import free_bytes
from kvkeep.store.block import LABEL_BYTES, Label, StoredBlock

MOST_BYTES = 1 << 32
"""Bytes of the largest block that is read."""

ABANDONED_S = 3600.0
"""Files in `new/` older than this many seconds are abandoned writes."""

REST_S = 5.0
"""Seconds after a failure during which an unavailable server is not called."""

Answer = TypeVar("Answer")


def most_bytes() -> int:
    """Bytes of the largest block that may be read now and fits in free memory."""
    free = free_bytes(torch.device("cpu"))
    return MOST_BYTES if free is None else min(MOST_BYTES, free)


def require_budget(budget: int | None) -> None:
    """Raise SpecError for a budget below one byte."""
    if budget is not None and budget < 1:
        raise SpecError(f"a store's budget of {budget} bytes; give at least 1, or None")


def require_seconds(what: str, seconds: float, example: int) -> None:
    """Raise SpecError for a time that is not positive and finite."""
    if not 0 < seconds < inf:
        raise SpecError(f"a {what} of {seconds} seconds; give more than 0, such as {example}")


class Backend(ABC):
    """Storage for blocks. Processes may share a storage, and threads may call a backend at the same
    time. A failure counts in `failures` and is a miss; it raises no error in the caller.

    Five methods are abstract. All other methods have defaults that call these five; override the
    defaults if each call costs a network round trip. `open_store` finds a class by its `schemes`
    and calls it with the URL and keyword arguments such as `budget=`.
    """

    name: ClassVar[str]

    schemes: ClassVar[Sequence[str]] = ()
    """The URL schemes that `open_store` opens with this class."""

    by_scheme: ClassVar[dict[str, Callable[..., Backend]]] = {}
    """All imported classes by their URL schemes."""

    failures: int = 0
    """Number of failed calls; `last_error` describes the latest."""
    last_error: str = ""

    damaged: int = 0
    """Number of blocks that were damaged or did not match their key."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for scheme in cls.__dict__.get("schemes", ()):
            cls.by_scheme[scheme] = cls

    @abstractmethod
    def get(self, key: str, *, used: bool = True) -> StoredBlock | None:
        """The verified block of a key, or None. `used=False` does not count as a use."""

    @abstractmethod
    def put(self, block: StoredBlock) -> bool:
        """Store a block unless it exists. Returns False on failure."""

    @abstractmethod
    def contains(self, key: str) -> bool:
        """Whether a block exists; `get` may still find it damaged."""

    @abstractmethod
    def delete(self, key: str) -> None:
        """Delete a block if it exists."""

    @abstractmethod
    def scan(self, prefix: str = "") -> Iterator[str]:
        """Iterate over the keys that start with `prefix`."""

    def as_one_call(self) -> AbstractContextManager[None]:
        """A context in which all calls of this thread share one deadline. The default has no
        deadline."""
        return nullcontext()

    def quarantine(self, key: str) -> None:
        """Move a block that is damaged or does not match its key, so that it is never returned
        again. The default deletes it."""
        self.damaged += 1
        self.delete(key)

    def leading(self, keys: Sequence[str]) -> list[StoredBlock]:
        """The blocks of `keys` in order, up to the first missing one."""
        found: list[StoredBlock] = []
        for key in keys:
            block = self.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def missing(self, keys: Sequence[str]) -> list[str]:
        """The keys whose blocks do not exist; keys whose state is unknown are left out."""
        return [key for key in keys if not self.contains(key)]

    def put_all(self, blocks: Iterable[StoredBlock]) -> int:
        """Store missing blocks; returns how many of `blocks` are stored afterwards."""
        return sum(map(self.put, blocks))

    def labels(self, keys: Sequence[str]) -> list[Label | None]:
        """The labels of blocks; None for a block that does not exist."""
        found = (self.get(key, used=False) for key in keys)
        return [None if block is None else Label.of(block) for block in found]

    def gc(self, older_than: float = ABANDONED_S, budget: int | None = None) -> int:
        """Remove abandoned writes and quarantined blocks older than `older_than` seconds, then the
        least recently used blocks until the rest fits `budget` bytes. Returns the bytes freed."""
        return 0

    def exists(self) -> bool:
        """Whether a store was ever created here."""
        return True

    def _checked(self, key: str, data: Any) -> StoredBlock | None:
        """Parse the data stored under a key. Returns None if the data is None or an exception, or
        is not the key's block, which is then quarantined."""
        if data is None or isinstance(data, Exception):
            return None
        try:
            return StoredBlock.from_bytes(
                data if isinstance(data, (bytes, bytearray)) else b"", key
            )
        except ValueError:
            self.quarantine(key)
        except MemoryError as error:
            self._failed(error)
        return None

    def _failed(self, error: BaseException) -> None:
        self.failures += 1
        self.last_error = f"{type(error).__name__}: {error}"

    def _label(self, key: str, data: Any) -> Label | None:
        """The label in a block's first bytes, `data`; None: there are no bytes."""
        if not data or not isinstance(data, (bytes, bytearray)):
            return None
        try:
            return Label.read(data, key)
        except ValueError:  # too few bytes, or a damaged block, which `get` will detect
            block = self.get(key, used=False)
            return None if block is None else Label.of(block)


class Remote(Backend):
    """A backend that keeps blocks as bytes and may be unavailable. After a failure, calls return a
    miss for five seconds, so that an unavailable server costs one timeout, not one per block."""

    _AT_ONCE: ClassVar[int] = 1
    _LABELS: ClassVar[int] = 16
    """Most blocks, and most labels, that are read in one request."""

    _paused_until = 0.0

    @abstractmethod
    def _data(self, keys: Sequence[str], most: int | None = None) -> list[Any]:
        """The first `most` bytes of each block, at least those of its label; None: all bytes. An
        answer is None if the block does not exist, and an exception if that is unknown."""

    def _used(self, keys: Sequence[str]) -> None:
        """Record the use of a prompt's blocks."""

    def get(self, key: str, *, used: bool = True) -> StoredBlock | None:
        return next(iter(self.leading([key], used=used)), None)

    def leading(self, keys: Sequence[str], *, used: bool = True) -> list[StoredBlock]:
        found: list[StoredBlock] = []
        with self.as_one_call():
            blocks = (
                self._checked(key, data)
                for some in self._batches(keys)
                for key, data in zip(some, self._data(some), strict=True)
            )
            for block in blocks:
                if block is None:
                    break
                found.append(block)
            if used:
                self._used(keys[: len(found)])
        return found

    def _batches(self, keys: Sequence[str]) -> Iterator[Sequence[str]]:
        """The keys of blocks, divided by requests."""
        return _parts(keys, self._AT_ONCE)

    def labels(self, keys: Sequence[str]) -> list[Label | None]:
        with self.as_one_call():
            return [
                self._label(key, data)
                for some in _parts(keys, self._LABELS)
                for key, data in zip(some, self._data(some, LABEL_BYTES), strict=True)
            ]

    def contains(self, key: str) -> bool:
        return self._exist([key]) == [True]

    def missing(self, keys: Sequence[str]) -> list[str]:
        return [key for key, known in zip(keys, self._exist(keys), strict=True) if known is False]

    def _exist(self, keys: Sequence[str]) -> list[bool | None]:
        """Whether each block exists; None: unknown."""
        found = self._data(keys, 1)
        return [None if isinstance(data, Exception) else data is not None for data in found]

    def put(self, block: StoredBlock) -> bool:
        with self.as_one_call():
            return self.contains(block.key) or self.put_all([block]) == 1

    @property
    def resting(self) -> bool:
        """Whether calls currently return misses because of a recent failure."""
        return time.monotonic() < self._paused_until

    def _asked(self, ask: Callable[[], Answer], otherwise: Answer) -> Answer:
        """Return `ask()`, or `otherwise` if it fails or the backend is resting."""
        if self.resting:
            return otherwise
        try:
            return ask()
        except FileNotFoundError:
            return otherwise
        except Exception as error:  # client libraries may raise any exception
            self._failed(error)
            if self._is_unavailable(error):
                self._paused_until = time.monotonic() + REST_S
            return otherwise

    def _is_unavailable(self, error: Exception) -> bool:
        """Whether further calls would fail after this error."""
        return True


def _parts(keys: Sequence[str], size: int) -> Iterator[Sequence[str]]:
    return (keys[start : start + size] for start in range(0, len(keys), size))
