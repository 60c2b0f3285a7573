"""Pictures of an answer's cache, for clients that request them in a stream."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from threading import Lock
from typing import Any, TypeVar, final

from torch import Tensor

from kvkeep.generate import Answer
from kvkeep.host import ModelCache
from kvkeep.page.picture import Taken, cut, picture, taken
from kvkeep.serve.events import Picture
from kvkeep.store.stats import StoredNode

_LOG = logging.getLogger("kvkeep.serve")
_INTERVAL_S = 0.25
_SHARE = 0.025  # share of time for an answer's last picture; the same share for earlier pictures
_SAVED_S = 0.05  # time that may accumulate while idle
_LONGEST_TEXT = 200  # most characters of a stored run's text

Clock = Callable[[], float]
"""Returns the time in seconds."""

Outline = Callable[[Tensor], list[StoredNode]]
"""Returns the outline of the store's prefixes for tokens, int64 (n,)."""

_Made = TypeVar("_Made")


@final
class Pace:
    """Limits work to a small share of the time; idle time accumulates a little. Thread-safe."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock, self._next, self._lock = clock, 0.0, Lock()

    @property
    def free(self) -> bool:
        """Whether work may start now."""
        return self._clock() >= self._next

    def took(self, seconds: float) -> None:
        """Count the seconds that a picture took."""
        with self._lock:
            saved = self._clock() - _SAVED_S / _SHARE
            self._next = max(self._next, saved) + seconds / _SHARE


@final
class Maker:
    """Makes an engine's pictures one at a time in a thread of its own. Last pictures of answers and
    earlier pictures have separate time shares, so that neither waits for the other."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self.clock = clock
        self.pace = {last: Pace(clock) for last in (False, True)}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kvkeep-picture")
        self._begun = self._done = 0  # each is counted by one thread

    def free(self, *, last: bool) -> bool:
        """Whether a cache may be read now; `last`: the cache of an answer that has ended."""
        return (last or self._begun == self._done) and self.pace[last].free

    def make(self, make: Callable[[], _Made], *, last: bool) -> Future[_Made]:
        """Queue a picture behind all pictures begun before."""

        def made() -> _Made:
            began = time.thread_time()  # processor time: waiting takes no time from answers
            try:
                return make()
            finally:
                self.pace[last].took(time.thread_time() - began)
                self._done += 1

        self._begun += 1
        return self._thread.submit(made)

    def close(self) -> None:
        """Cancel the pictures not yet begun, and end the thread."""
        self._thread.shutdown(cancel_futures=True)


@final
class Pictures:
    """The pictures of one answer: at most four per second, each after the client has received the
    last one, and a final one when the answer ends. An error ends the pictures, not the answer.

    Args:
        texts: returns the texts of the next token ids of the answer; called in the maker's thread.
        outline: returns the outline of the store's prefixes for a cache; None: the answer shares no
            prefixes.
        maker: the engine's maker.

    Attributes:
        looked: time of the last picture by the maker's clock.
    """

    def __init__(
        self,
        texts: Callable[[Sequence[int]], list[str]],
        outline: Callable[[ModelCache], Outline] | None,
        maker: Maker,
    ) -> None:
        self._texts_of, self._outline_of, self._maker = texts, outline, maker
        self._outline: Outline | None = None
        self._texts: list[str] = []
        self._awaited = self._failed = False  # awaited: the client has yet to receive one
        self.looked = float("-inf")

    # -- in the engine's thread -------------------------------------------------------------

    def look(self, answer: Answer, *, last: bool = False) -> Future[Picture | None] | None:
        """Take a picture of the answer's cache if one is due; its result is None if making it
        fails. `last`: the answer has ended."""
        cache, now = answer.cache, self._maker.clock()
        if self._failed or cache is None or not cache.fed:
            return None
        if not last and (self._awaited or now < self.looked + _INTERVAL_S):
            return None
        if not self._maker.free(last=last):
            return None
        try:
            held = taken(cache)
            ids = answer.ids[: held.tokens]
        except Exception:
            self._fail()
            return None
        self._find_outline(cache)
        self._awaited, self.looked = True, now
        self._maker.pace[last].took(self._maker.clock() - now)
        make = partial(self._made, held, ids, len(answer.prompt), answer.cached)
        return self._maker.make(make, last=last)

    def _find_outline(self, cache: ModelCache) -> None:
        if self._outline_of is not None:
            try:
                self._outline = self._outline_of(cache)
            except Exception:
                self._fail_outline()
            self._outline_of = None  # the outline does not change

    # -- in the maker's thread --------------------------------------------------------------

    def _made(self, held: Taken, ids: Tensor, prompt: int, found: int) -> Picture | None:
        try:
            self._texts += self._texts_of(ids[len(self._texts) :].tolist())
            made = picture(held, self._texts[: len(ids)], prompt=prompt, found=found)
            made["prefixes"] = self._prefixes(ids)
            return Picture(json.dumps(made), self._received)
        except Exception:
            self._fail()
            return None

    def _prefixes(self, ids: Tensor) -> list[dict[str, Any]] | None:
        if self._outline is None:
            return None
        try:
            return _as_json(self._outline(ids), self._texts)
        except Exception:
            self._outline = None
            self._fail_outline()
            return None

    # -- in any thread ----------------------------------------------------------------------

    def _received(self) -> None:
        self._awaited = False

    def _fail(self) -> None:
        self._failed = True
        _LOG.exception("a cache picture failed; its answer continues without pictures")

    def _fail_outline(self) -> None:
        _LOG.exception("the outline of a store failed; an answer's pictures continue without it")


def _as_json(nodes: Sequence[StoredNode], texts: Sequence[str]) -> list[dict[str, Any]]:
    """Nodes as JSON values, with text only for tokens that the client's own prompt has too."""
    found, ends = list[dict[str, Any]](), list[int]()
    for node in nodes:
        start = ends[node.parent] if node.parent >= 0 else 0
        ends.append(start + node.tokens)
        text = cut("".join(texts[start : start + node.shared]), _LONGEST_TEXT)
        fields = node._asdict() | {"start": start, "text": text}
        fields["bytes"] = fields.pop("nbytes")
        found.append(fields)
    return found
