"""What a prefix store puts into its backend, and finds there."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

from torch import Tensor

from kvkeep.store.backend import Backend, Block, beginning, digest, key_of
from kvkeep.store.hit import Shape
from kvkeep.store.stretch import Stretch
from kvkeep.store.tree import common

_LOOKED_AT = 16  # blocks that begin with the same token, to find the longest of


def share(
    backend: Backend,
    identity: str,
    tokens: Tensor,
    size: int,
    content_of: Callable[[int, int], Stretch],
    shape: Shape,
) -> None:
    """Put tokens, int64 (n,), into a backend in blocks of some size, unless they are there.

    Args:
        content_of: what the layers hold of those from a start to a stop.
    """
    starts = _keys(identity, tokens, 0, size)

    def block(key: str) -> Block:
        start = starts[key]
        own = tokens[start : start + size]
        content = content_of(start, start + len(own))
        return Block(identity, digest(tokens[:start]), own, content, shape.routed, shape.like)

    backend.put_all(map(block, backend.missing(list(starts))))


def shared(
    backend: Backend, identity: str, tokens: Tensor, first: int, size: int
) -> tuple[list[Block], int]:
    """What a backend has of tokens, int64 (n,), from `first` on: blocks that follow each other,
    and where their last token stands that is the same."""
    blocks: list[Block] = []
    stop = first
    for block in backend.leading(list(_keys(identity, tokens, first, size))):
        if not block.tokens.equal(tokens[stop : stop + size]) or not _follows(block, blocks):
            return blocks, stop
        blocks.append(block)
        stop += len(block.tokens)
    if stop < len(tokens):
        own = tokens[stop : stop + size]
        last = _alike(backend, identity, digest(tokens[:stop]), own)
        if last is not None and _follows(last, blocks):
            return [*blocks, last], stop + common(last.tokens, own)
    return blocks, stop


def _keys(identity: str, tokens: Tensor, first: int, size: int) -> dict[str, int]:
    """The keys of the blocks of tokens, and where each starts."""
    starts = range(first, len(tokens), size)
    return {
        key_of(identity, digest(tokens[:start]), tokens[start : start + size]): start
        for start in starts
    }


def _follows(block: Block, blocks: list[Block]) -> bool:
    """Whether a block is of the model that those before it are of."""
    return not blocks or (
        Shape.of_block(block) == Shape.of_block(blocks[-1]) and block.continues(blocks[-1])
    )


def _alike(backend: Backend, identity: str, prefix: str, tokens: Tensor) -> Block | None:
    """The block that begins like some tokens, as many as possible."""
    keys = list(islice(backend.scan(beginning(identity, prefix, int(tokens[0]))), _LOOKED_AT))
    labels = zip(keys, backend.labels(keys), strict=True)
    same = {key: common(label.tokens, tokens) for key, label in labels if label is not None}
    for key in sorted(filter(same.get, same), key=lambda key: -same[key]):
        found = backend.get(key)
        if found is not None:
            return found
    return None
