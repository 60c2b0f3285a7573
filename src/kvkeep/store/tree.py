"""RadixTree: token sequences with what was computed for them; a shared prefix is stored once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from heapq import nsmallest
from itertools import count, islice
from typing import Generic, NamedTuple, Protocol, Self, TypeVar

import torch
from torch import Tensor

from kvkeep.errors import StateError

_LOOKED_AT = 4096  # children of a node, for an outline


class Content(Protocol):
    """What is stored for a run of tokens."""

    def __len__(self) -> int:
        """How many tokens."""

    @property
    def nbytes(self) -> int:
        """Bytes that are freed when it is dropped."""

    def part(self, start: int, stop: int) -> Self:
        """A copy of the content for tokens `start` to `stop`."""


Kept = TypeVar("Kept", bound=Content)


class Node(Generic[Kept]):
    """A run of tokens that follows the parent's, up to the point where stored sequences differ."""

    def __init__(self, tokens: Tensor, content: Kept | None, parent: Node[Kept] | None) -> None:
        self.tokens = tokens
        self.content = content
        self.parent = parent
        self.children: dict[int, Node[Kept]] = {}
        self.locks = 0
        self.used = 0
        self.priority = 0

    @property
    def kept(self) -> Kept:
        """The content of a node that is not the root."""
        assert self.content is not None
        return self.content

    def path(self) -> list[Node[Kept]]:
        """The nodes from the root's child down to this one."""
        found, node = list[Node[Kept]](), self
        while node.parent is not None:
            found.append(node)
            node = node.parent
        return found[::-1]


class Match(NamedTuple, Generic[Kept]):
    """The longest stored prefix: its last node, and its length in tokens."""

    node: Node[Kept]
    length: int


class Branch(NamedTuple, Generic[Kept]):
    """A node in an outline: the index of its parent there, or -1 for the root; how many of its
    first tokens are those of the sequence that was asked about; and how many of its children are
    left out."""

    node: Node[Kept]
    parent: int
    shared: int
    left_out: int


class RadixTree(Generic[Kept]):
    """A radix tree over token ids, int64 (n,).

    Args:
        clock: increasing numbers, which record when a node was last used; trees that share a
            budget share the clock.

    Source: the radix tree of SGLang (arXiv 2312.07104).
    """

    def __init__(self, clock: Iterator[int] | None = None) -> None:
        self.root: Node[Kept] = Node(torch.empty(0, dtype=torch.int64), None, None)
        self._clock = clock or count(1)

    def match(self, tokens: Tensor) -> Match[Kept]:
        """The longest stored prefix of `tokens`; its nodes are marked as used."""
        found = self._walk(tokens)
        now = next(self._clock)
        for node in found.node.path():
            node.used = now
        return found

    def insert(
        self, tokens: Tensor, content_of: Callable[[int, int], Kept], priority: int = 0
    ) -> Node[Kept]:
        """Store `tokens`; `content_of(start, stop)` is called for those that are new.

        Returns:
            The node that holds the last token.
        """
        node, length = self.match(tokens)
        inside = length - sum(len(above.tokens) for above in node.path()[:-1])
        if node.parent is not None and inside < len(node.tokens):
            node = self._split(node, inside)
        if length < len(tokens):
            content = content_of(length, len(tokens))
            child = Node(tokens[length:].clone(), content, node)
            child.used = node.used or next(self._clock)
            node.children[int(tokens[length])] = child
            node = child
        for above in node.path():
            above.priority = max(above.priority, priority)
        return node

    def leaves(self) -> Iterator[Node[Kept]]:
        """Nodes without children."""
        return (node for node in self.nodes() if not node.children)

    def nodes(self) -> Iterator[Node[Kept]]:
        """All nodes but the root, parents first."""
        waiting = list(self.root.children.values())
        while waiting:
            node = waiting.pop()
            waiting += node.children.values()
            yield node

    def outline(self, tokens: Tensor, most: int) -> list[Branch[Kept]]:
        """The root and at most `most` other nodes, parents first: those of the longest stored
        prefix of `tokens`, then those nearest to the root; of siblings those used last, among
        the last 4096 to come."""
        match = self._walk(tokens)
        path = match.node.path()[:most]
        shared = {id(node): len(node.tokens) for node in path}
        if path and path[-1] is match.node:
            shared[id(match.node)] -= sum(shared.values()) - match.length
        left = most - len(path)
        found: list[Branch[Kept]] = []
        waiting = deque([(self.root, -1)])
        while waiting:
            node, parent = waiting.popleft()
            own = [child for child in path if child.parent is node]
            newest = islice(reversed(node.children.values()), _LOOKED_AT if left else 0)
            others = (child for child in newest if id(child) not in shared)
            some = nsmallest(left, others, key=lambda child: -child.used)
            left -= len(some)
            waiting += [(child, len(found)) for child in (*own, *some)]
            missing = len(node.children) - len(own) - len(some)
            found.append(Branch(node, parent, shared.get(id(node), 0), missing))
        return found

    def remove(self, leaf: Node[Kept]) -> int:
        """Remove a leaf; returns the bytes that this frees.

        Raises:
            StateError: it is locked, or has children.
        """
        if leaf.children or leaf.locks or leaf.parent is None:
            raise StateError("only a leaf that is not locked can be removed")
        del leaf.parent.children[int(leaf.tokens[0])]
        leaf.parent = None
        return leaf.kept.nbytes

    def check(self) -> None:
        """Raise StateError if the tree is inconsistent."""
        for node in self.nodes():
            parent = node.parent
            if parent is None or parent.children.get(int(node.tokens[0])) is not node:
                raise StateError(f"tokens {node.tokens[:4].tolist()}... are not under their parent")
            if not len(node.tokens) or len(node.kept) != len(node.tokens) or node.locks < 0:
                raise StateError(
                    f"{len(node.tokens)} tokens with content of {len(node.kept)}, "
                    f"locked {node.locks} times"
                )

    def _walk(self, tokens: Tensor) -> Match[Kept]:
        node, length = self.root, 0
        while length < len(tokens):
            child = node.children.get(int(tokens[length]))
            if child is None:
                break
            node = child
            same = common(node.tokens, tokens[length:])
            length += same
            if same < len(node.tokens):
                break
        return Match(node, length)

    def _split(self, node: Node[Kept], tokens: int) -> Node[Kept]:
        """Move the first `tokens` tokens of a node into a new parent node. Locks stay with the
        node."""
        above = Node(node.tokens[:tokens].clone(), node.kept.part(0, tokens), node.parent)
        assert node.parent is not None
        node.parent.children[int(above.tokens[0])] = above
        node.content = node.kept.part(tokens, len(node.tokens))
        node.tokens, node.parent = node.tokens[tokens:].clone(), above
        above.children[int(node.tokens[0])] = node
        above.used, above.priority = node.used, node.priority
        return above


def common(a: Tensor, b: Tensor) -> int:
    """How many leading tokens are equal."""
    most = min(len(a), len(b))
    differ = (a[:most] != b[:most]).nonzero()
    return int(differ[0]) if len(differ) else most
