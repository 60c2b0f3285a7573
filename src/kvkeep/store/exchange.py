"""Exchange: copies texts between a store's entries and the blocks of its backend, also in
threads."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import islice
from threading import Lock
from typing import Any, final

from torch import Tensor

from kvkeep.store.backend import Backend
from kvkeep.store.block import Label, StoredBlock, beginning, digest, key_of, token_bytes
from kvkeep.store.borders import Border, Borders, Place
from kvkeep.store.compressed import Compressed
from kvkeep.store.entries import Entries
from kvkeep.store.geometry import FindGeometry, ModelGeometry
from kvkeep.store.layer_slices import Pieces, Stretch
from kvkeep.store.tree import Node, begins, common

_LOG = logging.getLogger("kvkeep.store")
_READERS = 8
_MOST_BYTES = 1 << 30  # most bytes that wait to be written; a single text may exceed it
_LOOKED_AT = 16  # most blocks with one beginning of keys that are compared


@final
class Exchange:
    """Copies requested texts from a backend to a store's entries, and new entries to the backend,
    in blocks of `size` tokens. Threads may share an exchange.

    A block is found by the hash of its tokens and the hash of the tokens before it, then compared
    with the tokens and the model's geometry; a block that differs is quarantined.

    Callers need not wait for the backend: several threads read, and one thread writes in the order
    of calls. The threads change only the entries and the backend. They start when needed, and
    finish their work before Python exits.
    """

    def __init__(self, entries: Entries, backend: Backend, size: int) -> None:
        self._entries, self._backend, self._size = entries, backend, size
        self._borders = Borders(backend, size)
        self._readers = ThreadPoolExecutor(_READERS, "kvkeep-store-read")
        self._writer = ThreadPoolExecutor(1, "kvkeep-store-write")
        self._writes: dict[Future[None], int] = {}  # bytes of unfinished writes, and a few others
        self._lock = Lock()

    # -- prefixes ---------------------------------------------------------------------------

    def fetch(self, identity: str, tokens: Tensor, geometry: FindGeometry | None) -> None:
        """Copy blocks that the tree lacks from the backend. The entries are not locked while the
        backend is read. See `PrefixStore.match` for `geometry`."""
        entries = self._entries
        if geometry is None and identity not in entries.geometries:
            return
        with entries.hit(identity, tokens) as hit:
            if hit.length == len(tokens):
                return
            own = entries.geometries.get(identity)
            known = hit.length if own is None or own.states else hit.border
        agreed = partial(entries.geometry, identity, geometry)
        first = known // self._size * self._size
        blocks, stop = self._read(identity, tokens, first, agreed)
        if stop > known:
            devices = [layer.of_row.device for layer in agreed().layers]
            pieces = list[Stretch]()
            for block in blocks:
                pieces.append(block.content.to(devices, pieces[-1].stop if pieces else first))
            with entries.lock:
                if entries.tree(identity).match(tokens).length >= first:  # else evicted meanwhile
                    entries.keep(identity, tokens[:stop], Pieces(pieces))
            self._borders.note([block.key for block in blocks if block.content.whole])
        if identity in entries.geometries and agreed().windowed:
            self._fetch_window(identity, tokens, agreed())

    def _fetch_window(self, identity: str, tokens: Tensor, geometry: ModelGeometry) -> None:
        """Copy slots in windows from the backend, so that a longer prefix of tokens is found."""
        entries = self._entries
        devices = [layer.of_row.device for layer in geometry.layers]
        with entries.hit(identity, tokens) as hit, self._backend.as_one_call():
            if hit.length == hit.known:
                return
            known = tokens[: hit.known]
            text = identity, known, geometry, self._places(identity, known, 0)
            for window in self._borders.find(*text, above=hit.length):
                stored = tokens[: len(window)]
                if entries.add_window(identity, stored, window.to(devices, 0)):
                    return

    def begin_fetch(self, identity: str, tokens: Tensor, geometry: ModelGeometry) -> Future[None]:
        """`fetch` in another thread. The future holds its error."""
        return self._readers.submit(self.fetch, identity, tokens, lambda: geometry)

    def write(
        self, identity: str, tokens: Tensor, content: Pieces, geometry: ModelGeometry
    ) -> None:
        """Write the blocks of a text, int64 (n,), that the backend lacks, or has without the
        recurrent states after their last token; and the slots in windows after the text."""
        if geometry.windowed:
            content = Pieces(self._held(identity, tokens, content))
        self._write(identity, tokens, content, geometry)

    def _write(
        self, identity: str, tokens: Tensor, content: Pieces, geometry: ModelGeometry
    ) -> None:
        found = self._places(identity, tokens, 0)
        places = {one.key: one for one in found}

        def block(key: str) -> StoredBlock:
            if key not in places:
                assert border is not None
                return border.block(key, content)
            start, prefix, _ = places[key]
            own = tokens[start : start + self._size]
            part = content(start, start + len(own))
            return StoredBlock(identity, prefix, own, part, geometry.routed, geometry.of_rows)

        border = None
        if geometry.windowed:
            border = Border(identity, tokens, geometry, found, self._size)
        missing = self._backend.missing([*places, *(border.keys if border else ())])
        if border is not None:
            lacking = self._borders.lacking(border, content, missing)
            missing = [key for key in missing if key in places] + lacking
        stops = {key: min(one.start + self._size, len(tokens)) for key, one in places.items()}
        marked = [key for key in stops if stops[key] in content.marks and key not in missing]
        for key, label in zip(marked, self._backend.labels(marked) if marked else [], strict=True):
            if label is not None and len(label.tokens) not in label.marks:
                self._backend.delete(key)
                missing.append(key)
        self._backend.put_all(map(block, missing))

    def begin_write(
        self, identity: str, tokens: Tensor, content: Pieces, geometry: ModelGeometry
    ) -> None:
        """`write` in another thread; the content is copied before this returns. If too much waits
        to be written, or on an error, the text is not written, and a later prompt computes it."""
        nbytes = geometry.text_bytes(len(tokens))
        with self._lock:
            self._writes = {done: size for done, size in self._writes.items() if not done.done()}
            if self._writes and sum(self._writes.values()) + nbytes > _MOST_BYTES:
                _LOG.warning("the store's backend is slow, so %s bytes are not written", nbytes)
                return
            content = Pieces(self._held(identity, tokens, content))
            text = identity, tokens.clone(), content, geometry
            self._writes[self._writer.submit(self._write_or_log, *text)] = nbytes

    def _held(self, identity: str, tokens: Tensor, content: Pieces) -> list[Stretch]:
        """A text's stretches: from the tree if possible, because they never change and may have
        more windows; the rest is copied."""
        with self._entries.hit(identity, tokens) as hit:
            held = hit.stretches if hit.known == hit.length else []
        pieces = [one.marked(content.marks) for one in held]
        start = hit.length if pieces else 0
        return [*pieces, content(start, len(tokens))] if start < len(tokens) else pieces

    def _write_or_log(self, *text: Any) -> None:
        try:
            self._write(*text)
        except Exception as error:
            _LOG.warning("a text was not written to the store's backend", exc_info=error)

    def flush(self) -> None:
        """Wait until all earlier writes are complete."""
        if self._writes:
            self._writer.submit(int).result()

    def _read(
        self, identity: str, tokens: Tensor, first: int, geometry_of: FindGeometry
    ) -> tuple[list[StoredBlock], int]:
        """Find the longest stored part of a text from token `first` on.

        Returns:
            Consecutive blocks, and the index after the last token that they share with the text.
        """
        blocks: list[StoredBlock] = []
        stop, fit = first, True
        places = self._places(identity, tokens, first)
        leading = self._backend.leading([one.key for one in places])
        for (start, _, key), block in zip(places, leading, strict=False):
            own = tokens[start : start + self._size]
            if not block.tokens.equal(own) or block.why_not(geometry_of(), Stretch, start):
                self._backend.quarantine(key)
                fit = False
            elif fit:
                blocks.append(block)
                stop += len(own)
        if fit and stop < len(tokens):
            own = tokens[stop : stop + self._size]
            place = places[(stop - first) // self._size]
            last = self._alike(identity, place.prefix, own)
            if last is not None:
                if not last.why_not(geometry_of(), Stretch, stop):
                    return [*blocks, last], stop + common(last.tokens, own)
                self._backend.quarantine(last.key)
        return blocks, stop

    # -- compressed texts -------------------------------------------------------------------

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

    def fetch_compressed(
        self, identity: str, tokens: Tensor, longer_than: int, geometry: FindGeometry
    ) -> Node | None:
        """Copy the longest compressed text that is a prefix of `tokens` and has more than
        `longer_than` tokens from the backend; None if there is none."""
        for key in self._compressed(identity, tokens, longer_than):
            block = self._backend.get(key)
            if block is not None:
                if not block.why_not(self._entries.geometry(identity, geometry), Compressed):
                    text = Node(block.tokens, block.content, whole=True)
                    return self._entries.keep_text(identity, text)
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
            # Of equal ones the shortest: a text that ends there has the slots in its windows.
            order = {key: (-same[key], len(labels[key].tokens)) for key in same if same[key]}
            for key in sorted(order, key=lambda key: order[key]):
                found = self._backend.get(key)
                if found is not None:
                    return found
            return None

    def _labels(self, identity: str, prefix: str, token: int) -> dict[str, Label]:
        """The labels of at most 16 blocks that follow a prefix and begin with `token`, by key."""
        keys = list(islice(self._backend.scan(beginning(identity, prefix, token)), _LOOKED_AT))
        labels = zip(keys, self._backend.labels(keys), strict=True)
        return {key: label for key, label in labels if label is not None}

    def _places(self, identity: str, tokens: Tensor, first: int) -> list[Place]:
        """The blocks of a text, in order. Each token is hashed once for all prefixes."""
        before = hashlib.sha256(token_bytes(tokens[:first]))
        found: list[Place] = []
        for start in range(first, len(tokens), self._size):
            own, prefix = tokens[start : start + self._size], before.hexdigest()
            found.append(Place(start, prefix, key_of(identity, prefix, own)))
            before.update(token_bytes(own))
        return found


def _power(tokens: int) -> int:
    """The exponent of the greatest power of two that is at most `tokens`."""
    return tokens.bit_length() - 1
