"""Hit: a stored prefix that was found, and how a cache takes it over."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from kvkeep.cache import Cache
from kvkeep.errors import StateError
from kvkeep.layer.frozen import Run
from kvkeep.layer.history import History
from kvkeep.store.geometry import ModelGeometry, planes_of
from kvkeep.store.layer_slices import Stretch
from kvkeep.store.tree import Match, Node


class Hit:
    """The longest stored prefix of a prompt. It is locked against eviction until the hit is
    released: call `release`, or use the hit in a `with` statement.

    Attributes:
        length: tokens of the prefix; 0 if nothing was found.
    """

    def __init__(
        self,
        match: Match[Stretch],
        geometry: ModelGeometry | None,
        release: Callable[[Node[Stretch]], None],
    ) -> None:
        self.length = match.length if geometry is not None else 0
        self._geometry, self._release = geometry, release
        self._node: Node[Stretch] | None = match.node
        self._stretches = _stretches(match)

    def fits(self, cache: Cache) -> bool:
        """Whether the layers of a cache can hold it: their slots have the same planes."""
        geometry = self._geometry
        if geometry is None or not self.length or len(cache.layers) != len(geometry.layers):
            return False
        return all(
            planes_of(layer, own.of_row) == own.planes and not layer.policy.per_head
            for layer, own in zip(cache.layers, geometry.layers, strict=True)
        )

    def fill(self, cache: Cache) -> None:
        """Put it into an empty cache, without copying. The cache keeps it even when the store
        evicts the entry.

        Raises:
            StateError: the cache is not empty, or its specs differ from those of the entry.
        """
        if cache.fed:
            raise StateError(
                f"this cache holds {cache.fed} tokens; give an empty one, or reset() it"
            )
        geometry = self._geometry
        if not self.length or geometry is None:
            return
        if not self.fits(cache):
            raise StateError(
                f"a hit of {geometry}, for a cache of {len(cache.layers)} layers, "
                f"{cache.layers[0].kind}; build the cache with the specs of the stored entry"
            )
        for index, (layer, own) in enumerate(zip(cache.layers, geometry.of_rows, strict=True)):
            history = History()
            history.columns, history.geometry = self.length, own
            layer.adopt_frozen(history, [Run.of(one.layers[index]) for one in self._stretches])
        cache.routed = geometry.routed

    def release(self) -> None:
        """Unlock it, so that the store may evict it."""
        if self._node is not None:
            self._release(self._node)
            self._node = None

    def __enter__(self) -> Hit:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


def _stretches(match: Match[Stretch]) -> list[Stretch]:
    """The stretches of a match, in the order of their tokens; nothing is copied."""
    found, left = [], match.length
    for node in match.node.path():
        found.append(node.kept if left >= len(node.tokens) else node.kept.head(left))
        left -= len(node.tokens)
    return found
