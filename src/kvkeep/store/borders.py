"""Borders: what layers with sliding windows hold at the ends of texts, in blocks of a backend.

When a text ends, such a layer holds only its window, so the blocks of the text's tokens lack most
of the layer's slots. Three more kinds of blocks supply them. They have identities of their own, so
that they never replace a block of tokens, and are never changed:

- an *end* for each border whose window is not complete in the text's own blocks: the slots in the
  windows before the first and after the last full block of tokens in them.
- a *filling* for each full block of tokens in the windows whose own block may lack slots. All
  borders whose windows contain these tokens share it.
- a *sign* for each block of tokens within which texts end. It has no slots; it tells readers
  where to look for ends.

So a border writes at most the slots in its windows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from threading import Lock
from typing import NamedTuple, final

import torch
from torch import Tensor

from kvkeep.store.backend import Backend
from kvkeep.store.block import StoredBlock, beginning, digest, key_of
from kvkeep.store.geometry import ModelGeometry
from kvkeep.store.layer_slices import Pieces, Stretch, in_order

_SEPARATOR = "\n# "
_FILLING, _END, _SIGN = "slots in windows", "windows at ends", "places of ends"
_MOST_KNOWN = 4096  # keys of whole blocks that are remembered


class Place(NamedTuple):
    """A block of a text's tokens: the index of its first token, the hash of the tokens before it,
    and the key of the block."""

    start: int
    prefix: str
    key: str


def plain_identity(identity: str) -> tuple[str, str]:
    """The identity of the text that a block belongs to, and the kind of slots that the block adds
    to the text; empty for a block of the text's tokens."""
    whole, _, kind = identity.rpartition(_SEPARATOR)
    known = kind.partition(",")[0] in (_FILLING, _END, _SIGN)
    return (whole, kind.partition(",")[0]) if known else (identity, "")


class Border:
    """The end of a stored text, int64 (n,).

    Args:
        places: the blocks of `size` tokens of a text that begins with `tokens`.

    Attributes:
        end, sign: keys of the border's blocks.
        tail: key of the text's last block.
        fillings: the key of each filling that the border needs -> the place of the tokens.
    """

    def __init__(
        self,
        identity: str,
        tokens: Tensor,
        geometry: ModelGeometry,
        places: Sequence[Place],
        size: int,
    ) -> None:
        self.tokens, self._geometry, self._size = tokens, geometry, size
        n = len(tokens)
        count = torch.tensor(n)
        self._windows = [
            None if layer.window is None else int(layer.needed(count)) for layer in geometry.layers
        ]
        firsts = [first for first in self._windows if first is not None]
        within = places[: -(-n // size)] if min(firsts) < n else []
        self._own = [one for one in within if one.start + size > min(firsts)]
        self._last = places[(n - 1) // size]
        self._identity = identity
        self.fillings = {
            key_of(named(identity, _FILLING), one.prefix, self._tokens_of(one)): one
            for one in self._own[:-1]
            if one.start >= max(firsts)
        }
        self.end = key_of(
            named(identity, _END, size), self._last.prefix, self._tokens_of(self._last)
        )
        self.sign = sign_of(identity, self._last, tokens, size)
        self.tail = key_of(identity, self._last.prefix, self._tokens_of(self._last))

    @property
    def keys(self) -> list[str]:
        """The keys of the border's blocks."""
        return [*self.fillings, self.sign, self.end]

    def _tokens_of(self, place: Place) -> Tensor:
        return self.tokens[place.start : self._stop(place)]

    def _stop(self, place: Place) -> int:
        return min(place.start + self._size, len(self.tokens))

    def _ranges(self, first: int) -> list[tuple[int, int]]:
        """The positions of the end's slots, of a window from position `first` on."""
        n, whole = len(self.tokens), [one.start for one in self.fillings.values()]
        if not whole:
            return [(first, n)]
        return [(first, whole[0]), (whole[-1] + self._size, n)]

    def _held(self, key: str) -> list[list[tuple[int, int]]]:
        """The positions that a block holds in each layer."""
        if key == self.end:
            return [[] if at is None else self._ranges(at) for at in self._windows]
        if key == self.sign:
            return [[] for _ in self._windows]
        start = self.fillings[key].start
        return [[] if at is None else [(start, start + self._size)] for at in self._windows]

    def whole(self, content: Pieces, known: Collection[str], missing: Collection[str]) -> list[str]:
        """The keys of the text's blocks in the windows that have all slots once the missing blocks
        were put.

        Args:
            content: the text's slots.
            known: keys of blocks in the backend that have all slots.
            missing: keys of blocks that the backend lacks.
        """
        return [
            one.key
            for one in self._own
            if (
                content.whole(one.start, self._stop(one))
                if one.key in missing
                else one.key in known
            )
        ]

    def lacking(
        self, content: Pieces, whole: Collection[str], missing: Collection[str]
    ) -> list[str]:
        """The keys of the border's missing blocks, in the order in which they should be put. No end
        if the text's blocks have all slots in the windows; nothing if the content lacks some.

        Args:
            content, missing: see `whole`.
            whole: the result of `whole`.
        """
        n = len(self.tokens)
        for index, first in enumerate(self._windows):
            if first is not None and content.held(index, first, n) < n - first:
                return []
        if len(whole) == len(self._own):
            wanted = [self.sign] if n % self._size else []
        else:
            wanted = [key for key, one in self.fillings.items() if one.key not in whole]
            wanted += [self.sign, self.end]
        return [key for key in wanted if key in missing]

    def block(self, key: str, content: Pieces) -> StoredBlock:
        """The block of a key; its slots are copied from the text's slots."""
        geometry, place = self._geometry, self.fillings.get(key, self._last)
        kind = _FILLING if key in self.fillings else _END if key == self.end else _SIGN
        size = None if kind == _FILLING else self._size
        own = self._tokens_of(place)[: 1 if kind == _SIGN else None]
        held = [content.slots(index, ranges) for index, ranges in enumerate(self._held(key))]
        part = Stretch(held, len(own), first=place.start)
        identity = named(self._identity, kind, size)
        return StoredBlock(identity, place.prefix, own, part, geometry.routed, geometry.of_rows)

    def why_not(self, key: str, block: StoredBlock) -> str:
        """Why the block of a key does not hold the expected slots; empty if it does."""
        place = self.fillings.get(key, self._last)
        if not block.tokens.equal(self._tokens_of(place)):
            return "it has other tokens"
        if key == self.tail:
            return block.why_not(self._geometry, Stretch, place.start)
        held = [
            torch.cat([torch.arange(*one, dtype=torch.int32) for one in [(0, 0), *ranges]])
            for ranges in self._held(key)
        ]
        return block.why_not(self._geometry, Stretch, held=held)

    def joined(self, contents: Sequence[Stretch]) -> Stretch:
        """The slots in windows of several blocks, for the whole text."""
        n, pieces = len(self.tokens), Pieces(contents)
        layers = [
            in_order(pieces.slots(index, [] if first is None else [(first, n)]))
            for index, first in enumerate(self._windows)
        ]
        return Stretch(layers, n)


def named(identity: str, kind: str, size: int | None = None) -> str:
    """The identity of blocks of a kind, for texts in blocks of `size` tokens."""
    return f"{identity}{_SEPARATOR}{kind}" + ("" if size is None else f", blocks of {size}")


def sign_of(identity: str, place: Place, tokens: Tensor, size: int) -> str:
    """The key of the sign for a block of a text's tokens, (n,)."""
    first = tokens[place.start : place.start + 1]
    return key_of(named(identity, _SIGN, size), place.prefix, first)


@final
class Borders:
    """The borders of texts in a backend, for blocks of `size` tokens. Threads may share it."""

    def __init__(self, backend: Backend, size: int) -> None:
        self._backend, self._size = backend, size
        self._known: dict[str, None] = {}  # keys of blocks that have all slots, the oldest first
        self._lock = Lock()

    def note(self, keys: Collection[str]) -> None:
        """Remember that the backend has blocks of tokens with all slots."""
        with self._lock:
            self._known |= dict.fromkeys(keys)
            for key in list(self._known)[: max(0, len(self._known) - _MOST_KNOWN)]:
                del self._known[key]

    def lacking(self, border: Border, content: Pieces, missing: Collection[str]) -> list[str]:
        """The keys of the blocks that a border lacks, of those that the backend lacks. The text's
        missing blocks are about to be put."""
        with self._lock:
            known = set(self._known)
        whole = border.whole(content, known, missing)
        self.note(whole)
        return border.lacking(content, whole, missing)

    def find(
        self,
        identity: str,
        tokens: Tensor,
        geometry: ModelGeometry,
        places: Sequence[Place],
        above: int,
    ) -> Iterator[Stretch]:
        """Yield the slots in the windows at borders, the longest text first.

        Args:
            tokens: a text, int64 (n,); the borders are ends of stored texts that begin it.
            places: the blocks of the text.
            above: number of tokens that the stored texts exceed.
        """
        size = self._size
        below = [one for one in reversed(places) if one.start + size > above]
        signs = [sign_of(identity, one, tokens, size) for one in below]
        absent = set(self._backend.missing(signs))
        for place, sign in zip(below, signs, strict=True):
            if sign in absent:
                continue
            own = place.prefix, int(tokens[place.start])
            ends = beginning(named(identity, _END, size), *own)
            tails = beginning(identity, *own)
            keys = {*self._backend.scan(ends), *self._backend.scan(tails)}
            for n in range(min(place.start + size, len(tokens)), max(place.start, above), -1):
                last = digest(tokens[place.start : n])
                for key in {ends + last, tails + last} & keys:
                    found = self._read(Border(identity, tokens[:n], geometry, places, size), key)
                    if found is not None:
                        yield found

    def _read(self, border: Border, last: str) -> Stretch | None:
        """The slots in the windows at a border, of its fillings and of the block `last`, its end or
        its tail; None if a block is missing or wrong."""
        absent = set(self._backend.missing([*border.fillings]))
        keys = [last, *(key for key in border.fillings if key not in absent)]
        blocks = self._backend.leading(keys)
        found = zip(keys, blocks, strict=False)
        wrong = [key for key, block in found if border.why_not(key, block)]
        for key in wrong:
            self._backend.quarantine(key)
        if wrong or len(blocks) < len(keys):
            return None
        return border.joined([block.content for block in blocks])
