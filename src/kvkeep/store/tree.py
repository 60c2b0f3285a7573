"""RadixTree: token sequences with their slots; a shared prefix is stored once.

An interrupt at any point leaves a tree consistent: a node is complete before it enters the tree,
and each change of the tree is one assignment.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from heapq import nsmallest
from itertools import count, islice, pairwise
from typing import NamedTuple
from weakref import ref

import torch
from torch import Tensor

from kvkeep.errors import StateError
from kvkeep.store.layer_slices import Marks, Pieces, Stretch
from kvkeep.store.stats import StoredNode

_LOOKED_AT = 4096  # newest children of a node that an outline considers


class Lock:
    """While a lock is referenced, its node is not removed."""


class Node:
    """A run of tokens after the parent's, up to the point where stored sequences differ; or a text
    that is found only as a whole, below the root. The root has no tokens.

    Attributes:
        name: the bytes of the first token, or of all tokens of a whole text.
    """

    def __init__(self, tokens: Tensor, content: Stretch, *, whole: bool = False) -> None:
        self.tokens = tokens
        self.content = content
        self.name = tokens.numpy().tobytes() if whole else tokens[:1].numpy().tobytes()
        self.children: dict[bytes, Node] = {}
        self.used = 0
        self.priority = 0
        self._lock: Callable[[], Lock | None] = lambda: None

    @property
    def locked(self) -> bool:
        """Whether a lock of this node is still referenced."""
        return self._lock() is not None

    def lock(self) -> Lock:
        """Lock the node until the returned object is no longer referenced."""
        lock = self._lock() or Lock()
        self._lock = ref(lock)
        return lock

    def split(self, tokens: int) -> Node:
        """A copy of this node as two nodes: the first `tokens` tokens, and below them the rest with
        this node's children and locks. Returns the upper node."""
        above = Node(self.tokens[:tokens].clone(), self.content.part(0, tokens))
        below = Node(self.tokens[tokens:].clone(), self.content.part(tokens, len(self.tokens)))
        below.children, below._lock = self.children, self._lock
        above.children[below.name] = below
        for node in (above, below):
            node.used, node.priority = self.used, self.priority
        return above


class Match(NamedTuple):
    """The longest stored prefix: its nodes, from the root's child down, and its length in tokens.
    It may end inside the last node."""

    path: list[Node]
    length: int

    @property
    def marks(self) -> Marks:
        """The recurrent states in the path, by the number of tokens before them."""
        return Pieces([node.content for node in self.path]).marks


class RadixTree:
    """A radix tree over token ids, int64 (n,).

    Args:
        clock: increasing numbers, which record when a node was last used; trees that share a
            budget share the clock.

    Source: the radix tree of SGLang (arXiv 2312.07104).
    """

    def __init__(self, clock: Iterator[int] | None = None) -> None:
        self.root = Node(torch.empty(0, dtype=torch.int64), Stretch([], 0))
        self._clock = clock or count(1)

    def match(self, tokens: Tensor) -> Match:
        """The longest stored prefix of `tokens`; its nodes are marked as used."""
        found = self._walk(tokens)
        now = next(self._clock)
        for node in found.path:
            node.used = now
        return found

    def insert(self, tokens: Tensor, content: Pieces, priority: int = 0) -> list[Node]:
        """Store `tokens`; new tokens are copied from `content`.

        Returns:
            The nodes that hold the tokens, from the root's child down.
        """
        path, length = self.match(tokens)
        beyond = sum(len(node.tokens) for node in path) - length
        if beyond:
            parent = path[-2] if len(path) > 1 else self.root
            path[-1] = path[-1].split(len(path[-1].tokens) - beyond)
            parent.children[path[-1].name] = path[-1]
        for node in path:
            node.priority = max(node.priority, priority)
        if length < len(tokens):
            child = Node(tokens[length:].clone(), content(length, len(tokens)))
            child.used = path[-1].used if path else next(self._clock)
            child.priority = priority
            parent = path[-1] if path else self.root
            parent.children[child.name] = child
            path.append(child)
        return path

    def whole(self, tokens: Tensor, least: int) -> Node | None:
        """The longest whole text of at least `least` tokens that is a prefix of `tokens`; it is
        marked as used."""
        texts = self.root.children.values()
        found = [x for x in texts if len(x.tokens) >= least and begins(tokens, x.tokens)]
        best = max(found, key=lambda text: len(text.tokens), default=None)
        if best is not None:
            best.used = next(self._clock)
        return best

    def add_whole(self, text: Node) -> None:
        """Store a whole text."""
        text.used = next(self._clock)
        self.root.children[text.name] = text

    def leaves(self) -> Iterator[tuple[Node, Node]]:
        """Nodes without children, as pairs (parent, node)."""
        return ((parent, node) for parent, node in self._edges() if not node.children)

    def nodes(self) -> Iterator[Node]:
        """All nodes except the root, parents first."""
        return (node for _, node in self._edges())

    def sequences(self) -> Iterator[Tensor]:
        """The stored sequences that are not prefixes of other stored sequences."""
        waiting = [(node, [node.tokens]) for node in self.root.children.values()]
        while waiting:
            node, parts = waiting.pop()
            waiting += [(child, [*parts, child.tokens]) for child in node.children.values()]
            if not node.children:
                yield torch.cat(parts)

    def outline(self, tokens: Tensor, most: int) -> list[StoredNode]:
        """The root and at most `most` other nodes, parents first: the nodes of the longest stored
        prefix of `tokens`, then the nodes nearest to the root; among siblings the most recently
        used of the newest 4096."""
        match = self._walk(tokens)
        path = match.path[:most]
        left_in = ((node, match.length - node.content.first) for node in path)
        shared = {id(node): min(len(node.tokens), left) for node, left in left_in}
        following = {id(node): child for node, child in pairwise([self.root, *path])}
        left = most - len(path)
        found: list[StoredNode] = []
        waiting = deque([(self.root, -1)])
        while waiting:
            node, parent = waiting.popleft()
            own = [following[id(node)]] if id(node) in following else []
            newest = islice(reversed(node.children.values()), _LOOKED_AT if left else 0)
            others = (child for child in newest if id(child) not in shared)
            some = nsmallest(left, others, key=lambda child: -child.used)
            left -= len(some)
            waiting += [(child, len(found)) for child in (*own, *some)]
            missing = len(node.children) - len(own) - len(some)
            held = len(node.tokens), node.content.nbytes, node.locked
            found.append(StoredNode(parent, *held, shared.get(id(node), 0), missing))
        return found

    def remove(self, parent: Node, leaf: Node) -> int:
        """Remove a leaf; returns the bytes freed.

        Raises:
            StateError: the node is locked, or has children.
        """
        if leaf.children or leaf.locked:
            raise StateError("only a leaf that is not locked can be removed")
        del parent.children[leaf.name]
        return leaf.content.nbytes

    def check(self) -> None:
        """Raise StateError if the tree is inconsistent."""
        for parent, node in self._edges():
            if not len(node.tokens) or len(node.content) != len(node.tokens):
                raise StateError(f"{len(node.tokens)} tokens with content of {len(node.content)}")
            if parent.children.get(node.name) is not node:
                raise StateError(f"tokens {node.tokens[:4].tolist()}... are not under their parent")

    def _edges(self) -> Iterator[tuple[Node, Node]]:
        """All nodes except the root, as pairs (parent, node); parents come first."""
        waiting = [(self.root, node) for node in self.root.children.values()]
        while waiting:
            edge = waiting.pop()
            waiting += [(edge[1], node) for node in edge[1].children.values()]
            yield edge

    def _walk(self, tokens: Tensor) -> Match:
        path, node, length = list[Node](), self.root, 0
        while length < len(tokens):
            child = node.children.get(tokens[length : length + 1].numpy().tobytes())
            if child is None:
                break
            path.append(child)
            node = child
            same = common(node.tokens, tokens[length:])
            length += same
            if same < len(node.tokens):
                break
        return Match(path, length)


def common(a: Tensor, b: Tensor) -> int:
    """The number of equal leading tokens."""
    most = min(len(a), len(b))
    differ = (a[:most] != b[:most]).nonzero()
    return int(differ[0]) if len(differ) else most


def begins(tokens: Tensor, prefix: Tensor) -> bool:
    """Whether `prefix` (m,) is a prefix of `tokens` (n,)."""
    return len(prefix) <= len(tokens) and tokens[: len(prefix)].equal(prefix)
