"""Pictures of the cache of one answer, for a client that asks for them in its stream."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, final

from torch import Tensor

from kvkeep.batch import Answer
from kvkeep.page.picture import Taken, picture, taken
from kvkeep.serve.events import Pictured
from kvkeep.store.stats import StoredNode

_LOG = logging.getLogger("kvkeep.serve")
_INTERVAL_S = 0.25
_SHARE = 0.05  # of the engine's time that all pictures together may take
_LONGEST_TEXT = 200  # characters of a stored run's text


@final
class Pace:
    """When an engine may look at caches: all looks together take a small share of its time."""

    def __init__(self) -> None:
        self._next = 0.0

    @property
    def free(self) -> bool:
        """Whether a cache may be looked at now."""
        return time.monotonic() >= self._next

    def took(self, seconds: float) -> None:
        """Note that one was, for so long."""
        self._next = time.monotonic() + seconds / _SHARE


@final
class Pictures:
    """The pictures of one answer: at most four a second while it goes on, each when the client has
    got the one before it, and a last one when it ends. An error in one ends the pictures, not the
    answer.

    Args:
        texts: returns those of the next token ids of the answer's text; may be called from any
            thread, by one at a time.
        outline: returns the outline of the store's prefixes for the answer's tokens, int64 (n,);
            None: the answer shares none.
        pace: that of the engine.
    """

    def __init__(
        self,
        texts: Callable[[Sequence[int]], list[str]],
        outline: Callable[[Tensor], list[StoredNode]] | None,
        pace: Pace,
    ) -> None:
        self._texts_of, self._outline, self._pace = texts, outline, pace
        self._texts: list[str] = []
        self._awaited = self._failed = False  # whether the client lacks the last picture
        self._next = 0.0

    # -- in the engine's thread -------------------------------------------------------------

    def look(self, answer: Answer, *, last: bool = False) -> Pictured | None:
        """A picture of the answer's cache, if one is due; `last`: the answer has ended."""
        cache, now = answer.cache, time.monotonic()
        if self._failed or cache is None or not cache.fed:
            return None
        if not last and (self._awaited or now < self._next or not self._pace.free):
            return None
        try:
            held = taken(cache)
            ids = answer.ids[: held.tokens]
        except Exception:
            self._fail()
            return None
        self._awaited, self._next = True, now + _INTERVAL_S
        self._pace.took(time.monotonic() - now)
        prompt, found = len(answer.prompt), answer.cached
        return Pictured(lambda: self._made(held, ids, prompt, found), self._got)

    # -- in any thread ----------------------------------------------------------------------

    def _got(self) -> None:
        self._awaited = False

    def _made(self, held: Taken, ids: Tensor, prompt: int, found: int) -> dict[str, Any] | None:
        try:
            new = ids[len(self._texts) :].tolist()
            self._texts += self._texts_of(new)
            made = picture(held, self._texts[: len(ids)], prompt=prompt, found=found)
            nodes = None if self._outline is None else self._outline(ids)
        except Exception:
            self._fail()
            return None
        prefixes = None if nodes is None else _prefixes(nodes, self._texts)
        return made | {"prefixes": prefixes}

    def _fail(self) -> None:
        self._failed = True
        _LOG.exception("a picture of a cache failed; its answer goes on without")


def _prefixes(nodes: Sequence[StoredNode], texts: Sequence[str]) -> list[dict[str, Any]]:
    """Nodes as JSON values, with the text only of the tokens that the client's own text shares."""
    found, ends = list[dict[str, Any]](), list[int]()
    for node in nodes:
        start = ends[node.parent] if node.parent >= 0 else 0
        ends.append(start + node.tokens)
        text = "".join(texts[start : start + node.shared])
        cut = text if len(text) <= _LONGEST_TEXT else text[: _LONGEST_TEXT - 1] + "…"
        found.append(
            {
                "parent": node.parent,
                "start": start,
                "tokens": node.tokens,
                "bytes": node.nbytes,
                "locked": node.locked,
                "shared": node.shared,
                "text": cut,
                "left_out": node.left_out,
            }
        )
    return found
