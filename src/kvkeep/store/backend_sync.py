"""How a prefix store writes blocks to its backend and reads them back."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from kvkeep.store.backend import Backend, StoredBlock, beginning, digest, key_of, token_bytes
from kvkeep.store.compressed import Compressed, CompressedText, begins
from kvkeep.store.geometry import ModelGeometry
from kvkeep.store.layer_slices import Stretch
from kvkeep.store.tree import common

_LOOKED_AT = 16  # most blocks with the same first token that are compared
_NOTHING = digest(torch.empty(0, dtype=torch.int64))
"""The hash of no tokens, which stand before a whole text."""


class _Place(NamedTuple):
    """Where a block starts in its text, and the hash of the tokens before it."""

    start: int
    prefix: str


def share(
    backend: Backend,
    identity: str,
    tokens: Tensor,
    size: int,
    content_of: Callable[[int, int], Stretch],
    geometry: ModelGeometry,
) -> None:
    """Write tokens, int64 (n,), to a backend in blocks of `size` tokens; blocks that it has already
    are skipped.

    Args:
        content_of: returns the stretch of tokens from a start to a stop.
        geometry: of the model that computed them.
    """
    places = _places(identity, tokens, 0, size)

    def block(key: str) -> StoredBlock:
        start, prefix = places[key]
        own = tokens[start : start + size]
        content = content_of(start, start + len(own))
        return StoredBlock(identity, prefix, own, content, geometry.routed, geometry.of_rows)

    backend.put_all(map(block, backend.missing(list(places))))


def shared(
    backend: Backend,
    identity: str,
    tokens: Tensor,
    first: int,
    size: int,
    geometry_of: Callable[[], ModelGeometry],
) -> tuple[list[StoredBlock], int]:
    """Find tokens, int64 (n,), in a backend from `first` on. Blocks with other tokens or another
    geometry are quarantined.

    Args:
        geometry_of: returns the model's geometry; called only when a block was found.

    Returns:
        Consecutive blocks, and the index behind the last token that they share with `tokens`.
    """
    blocks: list[StoredBlock] = []
    stop, fit = first, True
    places = _places(identity, tokens, first, size)
    for (key, (start, _)), block in zip(
        places.items(), backend.leading(list(places)), strict=False
    ):
        own = tokens[start : start + size]
        if not block.tokens.equal(own) or geometry_of().why_not(block, start):
            backend.quarantine(key)
            fit = False
        elif fit:
            blocks.append(block)
            stop += len(own)
    if fit and stop < len(tokens):
        own = tokens[stop : stop + size]
        prefix = places[list(places)[(stop - first) // size]].prefix
        last = _alike(backend, identity, prefix, own)
        if last is not None:
            if not geometry_of().why_not(last, stop):
                return [*blocks, last], stop + common(last.tokens, own)
            backend.quarantine(last.key)
    return blocks, stop


def share_compressed(
    backend: Backend, identity: str, tokens: Tensor, content: Compressed, geometry: ModelGeometry
) -> None:
    """Write a compressed text, tokens int64 (n,), to a backend as one block, unless it has it."""
    block = StoredBlock(identity, _NOTHING, tokens, content, geometry.routed, geometry.of_rows)
    if backend.missing([block.key]):
        backend.put_all([block])


def shared_compressed(
    backend: Backend,
    identity: str,
    tokens: Tensor,
    longer_than: int,
    geometry_of: Callable[[], ModelGeometry],
) -> CompressedText | None:
    """The longest compressed text in a backend with which tokens, int64 (n,), begin, if it is
    `longer_than` so many tokens. Of texts with the same first token, some are compared. A text of
    another geometry is quarantined."""
    whole = key_of(identity, _NOTHING, tokens)
    with backend.as_one_call():
        scanned = backend.scan(beginning(identity, _NOTHING, int(tokens[0])))
        keys = list(islice((key for key in scanned if key != whole), _LOOKED_AT))
        lengths = {
            key: len(label.tokens)
            for key, label in zip(keys, backend.labels(keys), strict=True)
            if label is not None and begins(tokens, label.tokens)
        }
        lengths[whole] = len(tokens)
        for key in sorted(lengths, key=lambda key: -lengths[key]):
            block = backend.get(key) if lengths[key] > longer_than else None
            if block is None:
                continue
            geometry = geometry_of()
            if isinstance(block.content, Compressed) and not _why_not(block, geometry):
                return CompressedText(block.tokens, block.content, geometry)
            backend.quarantine(key)
    return None


def _why_not(block: StoredBlock, geometry: ModelGeometry) -> str:
    """Why a model of a geometry cannot use the block of a compressed text; empty if it can."""
    if not isinstance(block.content, Compressed):
        return "it is not compressed"
    said, own = [x[1:5] for x in block.geometries], [x[1:5] for x in geometry.of_rows]
    if (block.routed, said) != (geometry.routed, own):
        return f"it is of {said[:1]}, routed={block.routed}, not {own[:1]}, {geometry.routed}"
    return block.content.why_not(geometry)


def _places(identity: str, tokens: Tensor, first: int, size: int) -> dict[str, _Place]:
    """The blocks of tokens by their keys, in order. Each token is hashed into the prefixes once."""
    before = hashlib.sha256(token_bytes(tokens[:first]))
    found: dict[str, _Place] = {}
    for start in range(first, len(tokens), size):
        own, prefix = tokens[start : start + size], before.hexdigest()
        found[key_of(identity, prefix, own)] = _Place(start, prefix)
        before.update(token_bytes(own))
    return found


def _alike(backend: Backend, identity: str, prefix: str, tokens: Tensor) -> StoredBlock | None:
    """The block that shares the longest beginning with some tokens."""
    with backend.as_one_call():
        keys = list(islice(backend.scan(beginning(identity, prefix, int(tokens[0]))), _LOOKED_AT))
        labels = zip(keys, backend.labels(keys), strict=True)
        same = {key: common(label.tokens, tokens) for key, label in labels if label is not None}
        for key in sorted(filter(same.get, same), key=lambda key: -same[key]):
            found = backend.get(key)
            if found is not None:
                return found
        return None
