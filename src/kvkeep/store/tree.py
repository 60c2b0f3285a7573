"""RadixTree: runs of tokens and what was computed for them, each shared prefix once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from typing import Generic, NamedTuple, Protocol, Self, TypeVar

import torch
from torch import Tensor

from kvkeep.errors import StateError


class Content(Protocol):
    """What is kept of a run of tokens."""

    def __len__(self) -> int:
        """Tokens."""

    @property
    def nbytes(self) -> int:
        """Bytes that are freed with it."""

    def part(self, start: int, stop: int) -> Self:
        """That of some of the tokens, in memory of its own."""


Kept = TypeVar("Kept", bound=Content)


class Node(Generic[Kept]):
    """Tokens that follow those of the parent, up to where another run of tokens leaves them."""

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
        """The nodes from the first tokens to this one."""
        found, node = list[Node[Kept]](), self
        while node.parent is not None:
            found.append(node)
            node = node.parent
        return found[::-1]


class Match(NamedTuple, Generic[Kept]):
    """The longest prefix that is known: the last of its nodes, and all of its tokens' number."""

    node: Node[Kept]
    length: int


class RadixTree(Generic[Kept]):
    """A tree over token ids, int64 (n,), in which every stored token is found at its prefix.

    Args:
        clock: numbers that only grow, by which nodes are told that were used lately; trees that
            share a budget share it.

    Source: the radix tree of SGLang (arXiv 2312.07104).
    """

    def __init__(self, clock: Iterator[int] | None = None) -> None:
        self.root: Node[Kept] = Node(torch.empty(0, dtype=torch.int64), None, None)
        self._clock = clock or count(1)

    def match(self, tokens: Tensor) -> Match[Kept]:
        """The longest prefix of `tokens` that is stored; it counts as used."""
        found = self._walk(tokens)
        now = next(self._clock)
        for node in found.node.path():
            node.used = now
        return found

    def insert(
        self, tokens: Tensor, content_of: Callable[[int, int], Kept], priority: int = 0
    ) -> Node[Kept]:
        """Store `tokens`, of which `content_of(start, stop)` is asked for those that are new.

        Returns:
            The node in which they end.
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
        """Nodes that nothing follows."""
        return (node for node in self.nodes() if not node.children)

    def nodes(self) -> Iterator[Node[Kept]]:
        """All nodes but the root, parents first."""
        waiting = list(self.root.children.values())
        while waiting:
            node = waiting.pop()
            waiting += node.children.values()
            yield node

    def remove(self, leaf: Node[Kept]) -> int:
        """Forget a leaf; the bytes that this frees.

        Raises:
            StateError: it is locked, or something follows it.
        """
        if leaf.children or leaf.locks or leaf.parent is None:
            raise StateError("only a leaf that nobody has locked can be removed")
        del leaf.parent.children[int(leaf.tokens[0])]
        leaf.parent = None
        return leaf.kept.nbytes

    def check(self) -> None:
        """Raise StateError if the tree is not what it should be."""
        for node in self.nodes():
            parent = node.parent
            if parent is None or parent.children.get(int(node.tokens[0])) is not node:
                raise StateError(f"tokens {node.tokens[:4].tolist()}... are not where they belong")
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
        """Put the first `tokens` tokens of a node into a new one above it. Whoever has locked the
        node keeps it."""
        above = Node(node.tokens[:tokens].clone(), node.kept.part(0, tokens), node.parent)
        assert node.parent is not None
        node.parent.children[int(above.tokens[0])] = above
        node.content = node.kept.part(tokens, len(node.tokens))
        node.tokens, node.parent = node.tokens[tokens:].clone(), above
        above.children[int(node.tokens[0])] = node
        above.used, above.priority = node.used, node.priority
        return above


def common(a: Tensor, b: Tensor) -> int:
    """How many first tokens are the same."""
    most = min(len(a), len(b))
    differ = (a[:most] != b[:most]).nonzero()
    return int(differ[0]) if len(differ) else most
