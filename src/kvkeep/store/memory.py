"""Memory: blocks in a dict of this process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, final

from kvkeep.store.backend import Backend
from kvkeep.store.block import StoredBlock


@final
class Memory(Backend):
    """A backend in a dict of this process: for tests, and as an example of a backend."""

    name: ClassVar[str] = "memory"

    def __init__(self) -> None:
        self._blocks: dict[str, StoredBlock] = {}

    def get(self, key: str, *, used: bool = True) -> StoredBlock | None:
        return self._blocks.get(key)

    def put(self, block: StoredBlock) -> bool:
        self._blocks.setdefault(block.key, block)
        return True

    def contains(self, key: str) -> bool:
        return key in self._blocks

    def delete(self, key: str) -> None:
        self._blocks.pop(key, None)

    def scan(self, prefix: str = "") -> Iterator[str]:
        return iter([key for key in self._blocks if key.startswith(prefix)])
