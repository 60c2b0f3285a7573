"""The page of one run: which tokens of a text a cache keeps, after each chunk that it was fed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvkeep.host import ModelCache
from kvkeep.page.picture import columns_of, picture, taken
from kvkeep_lab.page.document import document

MOST_FRAMES = 32
"""Pictures of a page at most: with as many cells as pictures may have, four megabytes."""


class Frames:
    """Takes pictures of a cache while it is fed a text; pass it as `after` to
    `kvkeep_lab.evals.kept_positions.fed`.

    All pictures have equally many tokens in a column. Of more than `MOST_FRAMES` chunks it takes
    evenly spaced ones, the last always.

    Args:
        texts: of all the tokens.
        chunk: how many tokens are fed at once; None: all.
    """

    def __init__(self, texts: Sequence[str], chunk: int | None) -> None:
        self._texts = texts
        chunks = -(-len(texts) // (chunk or len(texts)))
        self._every = -(-chunks // MOST_FRAMES)
        self._left = chunks
        self.pictures: list[dict[str, Any]] = []

    def __call__(self, cache: ModelCache) -> None:
        """Take a picture of the cache after the next chunk. What is evicted after the last changes
        the last picture."""
        self._left -= 1
        if self._left > 0 and self._left % self._every:
            return
        now = taken(cache)
        heads = sum(held.heads for held in now.layers)
        group = columns_of(len(self._texts), heads)
        if self._left < 0:
            self.pictures.pop()
        self.pictures.append(picture(now, self._texts, group=group))


def inspection(title: str, facts: Mapping[str, str], pictures: Sequence[Mapping[str, Any]]) -> str:
    """The page, as one text of HTML.

    Args:
        facts: the run's settings, by name.
        pictures: see `Frames`; at least one.
    """
    # The columns of each picture are the first of the last one's, so texts are written once.
    without = [{key: one[key] for key in one if key != "texts"} for one in pictures]
    data = {
        "title": title,
        "facts": list(facts.items()),
        "texts": pictures[-1]["texts"],
        "pictures": without,
    }
    return document("inspect.html", title, data)
