"""How a prefix store writes blocks to its backend and reads them back."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from itertools import islice
from typing import NamedTuple

from torch import Tensor

from kvkeep.store.backend import Backend
from kvkeep.store.block import StoredBlock, beginning, digest, key_of, token_bytes
from kvkeep.store.compressed import Compressed, CompressedText, begins
from kvkeep.store.geometry import ModelGeometry
from kvkeep.store.layer_slices import Marks, Stretch
from kvkeep.store.tree import common

_LOOKED_AT = 16  # most blocks with the same start of their key that are compared


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
    marks: Marks,
) -> None:
    """Write tokens, int64 (n,), to a backend in blocks of `size` tokens; blocks that it has already
    are skipped, unless they lack the states of recurrent layers after their last token.

    Args:
        content_of: returns the stretch of tokens from a start to a stop.
        geometry: of the model that computed them.
        marks: the states that `content_of` has.
    """
    places = _places(identity, tokens, 0, size)

    def block(key: str) -> StoredBlock:
        start, prefix = places[key]
        own = tokens[start : start + size]
        content = content_of(start, start + len(own))
        return StoredBlock(identity, prefix, own, content, geometry.routed, geometry.of_rows)

    missing = backend.missing(list(places))
    stops = {key: min(start + size, len(tokens)) for key, (start, _) in places.items()}
    marked = [key for key in stops if stops[key] in marks and key not in missing]
    for key, label in zip(marked, backend.labels(marked) if marked else [], strict=True):
        if label is not None and len(label.tokens) not in label.marks:
            backend.delete(key)
            missing.append(key)
    backend.put_all(map(block, missing))


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
        if not block.tokens.equal(own) or block.why_not(geometry_of(), Stretch, start):
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
            if not last.why_not(geometry_of(), Stretch, stop):
                return [*blocks, last], stop + common(last.tokens, own)
            backend.quarantine(last.key)
    return blocks, stop


def share_compressed(
    backend: Backend, identity: str, tokens: Tensor, content: Compressed, geometry: ModelGeometry
) -> None:
    """Write a compressed text, tokens int64 (n,), to a backend as one block, unless it has it.

    In its key, the hash of its first tokens stands where other blocks have that of the tokens
    before them; they are as many as the greatest power of two in n.
    """
    first = digest(tokens[: 1 << _power(len(tokens))])
    block = StoredBlock(identity, first, tokens, content, geometry.routed, geometry.of_rows)
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
    `longer_than` so many tokens. A text of another geometry is quarantined.

    Args:
        geometry_of: returns the model's geometry; called only when a text was found.
    """
    for key in _compressed(backend, identity, tokens, longer_than):
        block = backend.get(key)
        if block is None:
            continue
        geometry = geometry_of()
        if block.why_not(geometry, Compressed):
            backend.quarantine(key)
        elif isinstance(block.content, Compressed):
            return CompressedText(block.tokens, block.content, geometry)
    return None


def _compressed(backend: Backend, identity: str, tokens: Tensor, longer_than: int) -> Iterator[str]:
    """Keys of compressed texts with which tokens may begin, the longest first."""
    for power in range(_power(len(tokens)), _power(longer_than + 1) - 1, -1):
        first = digest(tokens[: 1 << power])
        if power == _power(len(tokens)):
            yield key_of(identity, first, tokens)
            if longer_than + 1 == len(tokens):
                return
        with backend.as_one_call():
            scanned = backend.scan(beginning(identity, first, int(tokens[0])))
            keys = list(islice(scanned, _LOOKED_AT))
            labels = zip(keys, backend.labels(keys), strict=True)
            lengths = {key: len(x.tokens) for key, x in labels if x and begins(tokens, x.tokens)}
        fitting = [key for key, length in lengths.items() if longer_than < length < len(tokens)]
        yield from sorted(fitting, key=lambda key: -lengths[key])


def _power(tokens: int) -> int:
    """The exponent of the greatest power of two that is at most `tokens`."""
    return tokens.bit_length() - 1


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
