"""Exchange: copies blocks between a store's entries and its backend, also in threads."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from threading import Lock
from typing import NamedTuple, final

from torch import Tensor

from kvkeep.store.backend import Backend
from kvkeep.store.backend_texts import BackendTexts
from kvkeep.store.entries import Entries
from kvkeep.store.geometry import ModelGeometry
from kvkeep.store.layer_slices import Pieces, Stretch
from kvkeep.store.tree import Node

_LOG = logging.getLogger("kvkeep.store")
_READERS = 8
_MOST_BYTES = 1 << 30  # most bytes that wait to be written; a single text may exceed it


class _Write(NamedTuple):
    done: Future[None]
    nbytes: int


@final
class Exchange:
    """Copies requested blocks from a backend to a store's entries, and new entries to the backend.
    Threads may share an exchange.

    Callers need not wait for the backend: several threads read, and one thread writes in the order
    of calls. The threads change only the entries and the backend. They start when needed, and
    finish their work before Python exits.

    Args:
        backend: the backend; None: copy nothing.
        block: tokens per block of the backend.
    """

    def __init__(self, entries: Entries, backend: Backend | None, block: int) -> None:
        self._entries, self._block = entries, block
        self._texts = None if backend is None else BackendTexts(backend, block)
        self._readers = ThreadPoolExecutor(_READERS, "kvkeep-store-read")
        self._writer = ThreadPoolExecutor(1, "kvkeep-store-write")
        self._writes: list[_Write] = []  # unfinished and recently finished writes
        self._lock = Lock()

    def fetch(
        self, identity: str, tokens: Tensor, geometry: Callable[[], ModelGeometry] | None
    ) -> None:
        """Copy blocks that the tree lacks from the backend. The entries are not locked while the
        backend is read. See `PrefixStore.match` for `geometry`."""
        entries = self._entries
        if self._texts is None or (geometry is None and not entries.known(identity)):
            return
        with entries.hit(identity, tokens) as hit:
            known = hit.length
        if known == len(tokens):
            return
        agreed = partial(entries.geometry, identity, geometry)
        first = known // self._block * self._block
        blocks, stop = self._texts.read(identity, tokens, first, agreed)
        if stop <= known:
            return
        devices = [layer.of_row.device for layer in agreed().layers]
        pieces, marks, at = list[Stretch](), dict[int, Mapping[str, Tensor]](), first
        for block in blocks:
            content = block.content.to(devices)
            pieces.append(Stretch(content.layers, len(content), content.marks, at))
            marks |= {at + after: mark for after, mark in block.content.marks.items()}
            at += len(block.content)
        with entries.lock:
            if entries.tree(identity).match(tokens).length < first:
                return  # the prefix was evicted meanwhile
            entries.keep(identity, tokens[:stop], Pieces(pieces, marks))

    def begin_fetch(self, identity: str, tokens: Tensor, geometry: ModelGeometry) -> Future[None]:
        """`fetch` in another thread. The future holds its error."""
        return self._readers.submit(self.fetch, identity, tokens, lambda: geometry)

    def write(
        self,
        identity: str,
        tokens: Tensor,
        content: Pieces,
        geometry: ModelGeometry,
        *,
        wait: bool,
    ) -> None:
        """Write tokens, int64 (n,), to the backend.

        Args:
            content: the tokens' slots, which are copied before this returns.
            wait: write now. Otherwise a thread writes; if too much waits to be written, or on an
                error, the tokens are not written, and a later prompt computes them.
        """
        if self._texts is None:
            return
        if wait:
            self._texts.write(identity, tokens, content, geometry)
            return
        nbytes = geometry.text_bytes(len(tokens))
        with self._lock:
            self._writes = [one for one in self._writes if not one.done.done()]
            if self._writes and sum(one.nbytes for one in self._writes) + nbytes > _MOST_BYTES:
                _LOG.warning("the store's backend is slow, so %s bytes are not written", nbytes)
                return
            # Take stretches from the tree if possible: they never change, so need no copy.
            with self._entries.hit(identity, tokens) as hit:
                pieces = hit.stretches if hit.known == hit.length else []
            start = hit.length if pieces else 0
            if start < len(tokens):
                pieces = [*pieces, content(start, len(tokens))]
            args = identity, tokens.clone(), content._replace(stretches=pieces), geometry
            job = partial(_logged, partial(self._texts.write, *args))
            self._writes.append(_Write(self._writer.submit(job), nbytes))

    def text(
        self, identity: str, tokens: Tensor, least: int, geometry: Callable[[], ModelGeometry]
    ) -> Node | None:
        """The longest compressed text of at least `least` tokens that is a prefix of `tokens`, in
        the entries or the backend. See `PrefixStore.match` for `geometry`."""
        entries = self._entries
        text = entries.text(identity, tokens, least)
        longest = least - 1 if text is None else len(text.tokens)
        if self._texts is None or longest >= len(tokens):
            return text
        agreed = partial(entries.geometry, identity, geometry)
        block = self._texts.read_compressed(identity, tokens, longest, agreed)
        if block is None:
            return text
        return entries.keep_text(identity, Node(block.tokens, block.content, whole=True))

    def keep_text(self, identity: str, text: Node, geometry: ModelGeometry) -> None:
        """Keep a compressed text, and write it to the backend."""
        self._entries.keep_text(identity, text)
        if self._texts is not None:
            self._texts.write_compressed(identity, text.tokens, text.content, geometry)

    def flush(self) -> None:
        """Wait until all earlier writes are complete."""
        if self._writes:
            self._writer.submit(int).result()


def _logged(job: Callable[[], None]) -> None:
    try:
        job()
    except Exception as error:
        _LOG.warning("a text was not written to the store's backend", exc_info=error)
