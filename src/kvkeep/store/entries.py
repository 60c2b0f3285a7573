"""Entries: the texts that a prefix store holds in memory, within a budget of bytes."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import count
from threading import RLock

import torch
from torch import Tensor

from kvkeep.errors import StateError
from kvkeep.planes import POSITION
from kvkeep.store.backend import require_budget
from kvkeep.store.geometry import FindGeometry, ModelGeometry
from kvkeep.store.hit import Hit
from kvkeep.store.layer_slices import Pieces, Stretch
from kvkeep.store.tree import Node, RadixTree


class Entries:
    """A radix tree of texts for each identity, and compressed texts. They share one budget;
    `kvkeep.PrefixStore` describes the eviction. Threads may share the entries. Bytes and locks are
    computed from the entries, not counted, so they stay consistent after an interrupt at any point.

    Args:
        budget: most bytes held; None: no limit.

    Attributes:
        evicted: bytes evicted so far.
        geometries: the geometry of each identity's entries.
        lock: held while entries are read or changed.

    Raises:
        SpecError: a budget below 1.
    """

    def __init__(self, budget: int | None) -> None:
        require_budget(budget)
        self.budget = budget
        self.evicted = 0
        self.lock = RLock()
        self._trees: dict[str, RadixTree] = {}
        self.geometries: dict[str, ModelGeometry] = {}
        self._clock = count(1)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        with self.lock:
            return sum(node.content.nbytes for node in self.nodes())

    # -- geometries -------------------------------------------------------------------------

    def geometry(self, identity: str, find: FindGeometry | None) -> ModelGeometry:
        """The geometry of an identity's entries; `find` is called only the first time."""
        own = self.geometries.get(identity)
        if own is None:
            assert find is not None
            own = self.agreed(identity, find())
        return own

    def agreed(self, identity: str, geometry: ModelGeometry) -> ModelGeometry:
        """Set the geometry of an identity's entries, or check it.

        Raises:
            StateError: the entries have another geometry.
        """
        with self.lock:
            known = self.geometries.setdefault(identity, geometry)
        if known != geometry:
            raise StateError(
                f"identity {identity[:60]!r} has entries of another model: {known}, not "
                f"{geometry}; give each model its own identity"
            )
        return known

    # -- prefixes ---------------------------------------------------------------------------

    def tree(self, identity: str) -> RadixTree:
        """The tree of an identity; hold the lock while using it."""
        return self._trees.setdefault(identity, RadixTree(self._clock))

    def hit(self, identity: str, tokens: Tensor) -> Hit:
        """The longest prefix of tokens (n,), locked until it is released."""
        with self.lock:
            return Hit(self.tree(identity).match(tokens), self.geometries.get(identity))

    def keep(self, identity: str, tokens: Tensor, content: Pieces, priority: int = 0) -> int:
        """Put tokens into the tree as far as the budget allows; returns how many of them it holds
        then. The geometry must be known.

        Slots in windows and recurrent states that the tree lacks are added to its tokens, too.
        """
        with self.lock:
            tree, geometry = self.tree(identity), self.geometries[identity]
            path, known = match = tree.match(tokens)
            marks, held = content.marks, match.marks
            lacking = [at for at in sorted(marks) if 0 < at <= known and at not in held]
            beyond = [at for at in marks if at > known]

            def added(length: int) -> int:
                marked = sum(at <= length for at in beyond)
                return content.nbytes(known, length) + geometry.state_bytes * marked

            length, new = len(tokens), added(len(tokens))
            states = geometry.state_bytes * len(lacking)
            room = self._make_room(new + states, path)
            if new > room:
                length = known + bisect_right(range(known + 1, length + 1), room, key=added)
            path = tree.insert(tokens[:length], content, priority)
            if lacking:  # prefer later states: hits end there
                fitting = max(0, room - added(length)) // geometry.state_bytes
                lacking = lacking[max(0, len(lacking) - fitting) :]
                new_marks = {at: marks[at] for at in lacking}
                for node in path:
                    node.content = node.content.marked(new_marks)
            if geometry.windowed:
                self._add_windows(path, content, known)
            return length

    def add_window(self, identity: str, tokens: Tensor, window: Stretch) -> bool:
        """Add slots in windows after tokens (n,), if the tree holds the tokens and, with the added
        slots, everything that a hit of them needs. Returns whether it does."""
        with self.lock:
            match, count = self.tree(identity).match(tokens), torch.tensor(len(tokens))
            contents = [window, *(node.content for node in match.path)]
            for index, layer in enumerate(self.geometries[identity].layers):
                held = [one.layers[index][POSITION].flatten().cpu() for one in contents]
                needed = torch.arange(int(layer.needed(count)), len(tokens))
                if layer.window is not None and not torch.isin(needed, torch.cat(held)).all():
                    return False
            if match.length < len(tokens):
                return False
            self._add_windows(match.path, Pieces([window]), len(tokens))
            return True

    def _add_windows(self, path: Sequence[Node], content: Pieces, known: int) -> None:
        """Add slots that nodes lack among the first `known` tokens, if they fit."""
        found, first = list[tuple[Node, Stretch]](), content.stretches[0].first
        for node in path:
            own = node.content
            if own.first < known and own.stop > first:
                found.append((node, own.lacking(content(own.first, own.stop))))
        needed = sum(new.nbytes for _, new in found)
        if needed and self._make_room(needed, path) >= needed:
            for node, new in found:
                node.content = node.content.with_slots(new)

    # -- compressed texts -------------------------------------------------------------------

    def text(self, identity: str, tokens: Tensor, least: int) -> Node | None:
        """The longest compressed text of at least `least` tokens that is a prefix of `tokens` (n,);
        None if there is none."""
        with self.lock:
            return self.tree(identity).whole(tokens, least)

    def keep_text(self, identity: str, text: Node) -> Node:
        """Hold a compressed text if the budget has room. Returns `text`, or the text already held
        with the same tokens."""
        with self.lock:
            tree, nbytes = self.tree(identity), text.content.nbytes
            known = tree.whole(text.tokens, len(text.tokens))
            fits = self.budget is None or nbytes <= self.budget
            if known is None and fits and nbytes <= self._make_room(nbytes):
                tree.add_whole(text)
            return known or text

    # -- all entries ------------------------------------------------------------------------

    def clear(self) -> None:
        """Remove all entries that are not locked."""
        with self.lock:
            self._make_room(None)

    def _make_room(self, nbytes: int | None, spared: Sequence[Node] = ()) -> int:
        """Evict entries, except the nodes `spared`, until `nbytes` fit (None: evict all entries) or
        nothing is left to evict. Returns how many bytes now fit; without a budget, `nbytes`."""
        if nbytes is not None and self.budget is None:
            return nbytes
        room = (self.budget or 0) - self.nbytes
        while nbytes is None or room < nbytes:
            free = [
                (tree, parent, leaf)
                for tree in self._trees.values()
                for parent, leaf in tree.leaves()
                if not leaf.locked and not any(leaf is node for node in spared)
            ]
            if not free:
                break
            tree, parent, leaf = min(free, key=lambda found: (found[2].priority, found[2].used))
            freed = tree.remove(parent, leaf)
            room += freed
            self.evicted += freed
        return room

    def nodes(self) -> Iterator[Node]:
        """The nodes of all trees; hold the lock while using them."""
        return (node for tree in self._trees.values() for node in tree.nodes())

    def check(self) -> None:
        """Raise StateError if the entries are inconsistent."""
        with self.lock:
            held, expected = self.nbytes, 0
            for identity, tree in self._trees.items():
                tree.check()
                for node in tree.nodes():
                    expected += node.content.bytes_in(self.geometries[identity])
            if held != expected or held > (self.budget or held):
                raise StateError(f"{held} bytes held, {expected} expected, budget {self.budget}")
