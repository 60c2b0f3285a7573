"""BackendTexts: reads and writes texts as blocks of a backend."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from itertools import islice
from typing import NamedTuple, final

from torch import Tensor

from kvkeep.store.backend import Backend
from kvkeep.store.block import Label, StoredBlock, beginning, digest, key_of, token_bytes
from kvkeep.store.compressed import Compressed
from kvkeep.store.geometry import ModelGeometry
from kvkeep.store.layer_slices import Pieces, Stretch
from kvkeep.store.tree import begins, common

_LOOKED_AT = 16  # most blocks with one beginning of keys that are compared


class _Place(NamedTuple):
    """A block's start in its text, and the hash of the tokens before it."""

    start: int
    prefix: str


@final
class BackendTexts:
    """Texts in a backend, in blocks of `size` tokens, int64 (n,).

    A block is found by the hash of its tokens and the hash of the tokens before it, then compared
    with the tokens and the model's geometry; a block that differs is quarantined. `geometry_of`
    returns the geometry; it is called only if a block was found.
    """

    def __init__(self, backend: Backend, size: int) -> None:
        self._backend, self._size = backend, size

    def write(
        self, identity: str, tokens: Tensor, content: Pieces, geometry: ModelGeometry
    ) -> None:
        """Write the blocks of a text that the backend lacks, or has without the recurrent states
        after their last token. `geometry`: the model's."""
        places = self._places(identity, tokens, 0)

        def block(key: str) -> StoredBlock:
            start, prefix = places[key]
            own = tokens[start : start + self._size]
            part = content(start, start + len(own))
            return StoredBlock(identity, prefix, own, part, geometry.routed, geometry.of_rows)

        missing = self._backend.missing(list(places))
        stops = {key: min(start + self._size, len(tokens)) for key, (start, _) in places.items()}
        marked = [key for key in stops if stops[key] in content.marks and key not in missing]
        for key, label in zip(marked, self._backend.labels(marked) if marked else [], strict=True):
            if label is not None and len(label.tokens) not in label.marks:
                self._backend.delete(key)
                missing.append(key)
        self._backend.put_all(map(block, missing))

    def read(
        self, identity: str, tokens: Tensor, first: int, geometry_of: Callable[[], ModelGeometry]
    ) -> tuple[list[StoredBlock], int]:
        """Find the longest stored part of a text from token `first` on.

        Returns:
            Consecutive blocks, and the index after the last token that they share with the text.
        """
        blocks: list[StoredBlock] = []
        stop, fit = first, True
        places = self._places(identity, tokens, first)
        leading = self._backend.leading(list(places))
        for (key, (start, _)), block in zip(places.items(), leading, strict=False):
            own = tokens[start : start + self._size]
            if not block.tokens.equal(own) or block.why_not(geometry_of(), Stretch, start):
                self._backend.quarantine(key)
                fit = False
            elif fit:
                blocks.append(block)
                stop += len(own)
        if fit and stop < len(tokens):
            own = tokens[stop : stop + self._size]
            prefix = places[list(places)[(stop - first) // self._size]].prefix
            last = self._alike(identity, prefix, own)
            if last is not None:
                if not last.why_not(geometry_of(), Stretch, stop):
                    return [*blocks, last], stop + common(last.tokens, own)
                self._backend.quarantine(last.key)
        return blocks, stop

    def write_compressed(
        self, identity: str, tokens: Tensor, content: Stretch, geometry: ModelGeometry
    ) -> None:
        """Write a compressed text as one block, unless the backend has it.

        In its key, a hash of the text's first 2**k tokens, for the greatest possible k, replaces
        the hash of preceding tokens.
        """
        first = digest(tokens[: 1 << _power(len(tokens))])
        block = StoredBlock(identity, first, tokens, content, geometry.routed, geometry.of_rows)
        if self._backend.missing([block.key]):
            self._backend.put_all([block])

    def read_compressed(
        self,
        identity: str,
        tokens: Tensor,
        longer_than: int,
        geometry_of: Callable[[], ModelGeometry],
    ) -> StoredBlock | None:
        """The longest compressed text that is a prefix of `tokens` and has more than `longer_than`
        tokens; None if there is none."""
        for key in self._compressed(identity, tokens, longer_than):
            block = self._backend.get(key)
            if block is not None:
                if not block.why_not(geometry_of(), Compressed):
                    return block
                self._backend.quarantine(key)
        return None

    def _compressed(self, identity: str, tokens: Tensor, longer_than: int) -> Iterator[str]:
        """Keys of compressed texts that may be prefixes of `tokens`, the longest first."""
        for power in range(_power(len(tokens)), _power(longer_than + 1) - 1, -1):
            first = digest(tokens[: 1 << power])
            if power == _power(len(tokens)):
                yield key_of(identity, first, tokens)
                if longer_than + 1 == len(tokens):
                    return
            with self._backend.as_one_call():
                labels = self._labels(identity, first, int(tokens[0]))
                lengths = {k: len(x.tokens) for k, x in labels.items() if begins(tokens, x.tokens)}
            fitting = [key for key, length in lengths.items() if longer_than < length < len(tokens)]
            yield from sorted(fitting, key=lambda key: -lengths[key])

    def _alike(self, identity: str, prefix: str, tokens: Tensor) -> StoredBlock | None:
        """The block after `prefix` that shares the most leading tokens with `tokens`."""
        with self._backend.as_one_call():
            labels = self._labels(identity, prefix, int(tokens[0]))
            same = {key: common(label.tokens, tokens) for key, label in labels.items()}
            for key in sorted(filter(same.get, same), key=lambda key: -same[key]):
                found = self._backend.get(key)
                if found is not None:
                    return found
            return None

    def _labels(self, identity: str, prefix: str, token: int) -> dict[str, Label]:
        """The labels of at most 16 blocks that follow a prefix and begin with `token`, by key."""
        keys = list(islice(self._backend.scan(beginning(identity, prefix, token)), _LOOKED_AT))
        labels = zip(keys, self._backend.labels(keys), strict=True)
        return {key: label for key, label in labels if label is not None}

    def _places(self, identity: str, tokens: Tensor, first: int) -> dict[str, _Place]:
        """The blocks of a text by key, in order. Each token is hashed once for all prefixes."""
        before = hashlib.sha256(token_bytes(tokens[:first]))
        found: dict[str, _Place] = {}
        for start in range(first, len(tokens), self._size):
            own, prefix = tokens[start : start + self._size], before.hexdigest()
            found[key_of(identity, prefix, own)] = _Place(start, prefix)
            before.update(token_bytes(own))
        return found


def _power(tokens: int) -> int:
    """The exponent of the greatest power of two that is at most `tokens`."""
    return tokens.bit_length() - 1
