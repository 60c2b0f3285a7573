"""Blocks in chat messages: found again, by their marks, in what a chat template makes of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any
from uuid import uuid4

from kvkeep.blocks.parts import Mark, Marked, Refused, is_part, marked

_Render = Callable[[Any], str]


class Marks:
    """Marks around blocks, in letters and digits only, which templates leave as they are. They are
    drawn anew for each rendering, so that no text can have them.

    Args:
        wanted: the numbers of the blocks that get marks, counted in the order of `put`.
    """

    def __init__(self, wanted: Callable[[int], bool] = lambda _: True) -> None:
        self._name = uuid4().hex
        self._pattern = re.compile(f"{self._name}([az])([0-9]+)q")
        self._wanted = wanted
        self.texts: list[str] = []

    def put(self, text: Marked) -> str:
        """A text with marks around those of its blocks that are wanted."""
        first = len(self.texts)
        self.texts += [text.text[mark.start : mark.stop] for mark in text.marks]
        places: list[tuple[int, int, int, str]] = []
        for index, mark in enumerate(text.marks, first):
            if self._wanted(index) and mark.stop > mark.start:
                # At one place: inner ends, outer ends, outer beginnings, inner beginnings.
                places.append((mark.start, 1, index, f"{self._name}a{index}q"))
                places.append((mark.stop, 0, -index, f"{self._name}z{index}q"))
        pieces, last = list[str](), 0
        for place, _, _, mark_text in sorted(places):
            pieces += [text.text[last:place], mark_text]
            last = place
        return "".join([*pieces, text.text[last:]])

    def taken(self, rendered: str) -> tuple[str, dict[int, list[tuple[str, int]]]]:
        """A text without its marks; and of each mark, where its ends were."""
        pieces, last, length = list[str](), 0, 0
        found: dict[int, list[tuple[str, int]]] = {}
        for match in self._pattern.finditer(rendered):
            pieces.append(rendered[last : match.start()])
            length += len(pieces[-1])
            found.setdefault(int(match[2]), []).append((match[1], length))
            last = match.end()
        return "".join([*pieces, rendered[last:]]), found


def rendered(given: Mapping[str, Any], render: _Render) -> tuple[str, list[Mark | Refused]]:
    """What a template makes of messages, tools and so on that contain parts.

    Args:
        render: gives the text of what contains plain text only.

    Returns:
        As `located`.
    """
    return located(lambda marks: render(_replaced(given, marks.put)))


def located(render: Callable[[Marks], str]) -> tuple[str, list[Mark | Refused]]:
    """Where the blocks of a text are that some code renders.

    Args:
        render: renders the text, with each block passed through `Marks.put`; called several times,
            it puts the same blocks in the same order each time.

    Returns:
        The text as it is without any marks; and of each block that is to be reused, those inside
        others behind them, where it is, or why that is not known.
    """
    none = Marks(lambda _: False)
    plain = render(none)
    good = set(range(len(none.texts)))
    for attempt in range(2):
        marks = Marks(frozenset(good).__contains__)
        bare, ends = marks.taken(render(marks))
        if bare == plain:
            break
        if attempt == 0:  # some block is changed; which one, each tells by itself
            good = {index for index in good if _left_alone(index, render, plain)}
        else:
            good, ends = set(), {}
    return plain, [_place(text, index, good, ends) for index, text in enumerate(none.texts)]


def _left_alone(index: int, render: Callable[[Marks], str], plain: str) -> bool:
    marks = Marks(index.__eq__)
    return marks.taken(render(marks))[0] == plain


def _place(
    text: str, index: int, good: set[int], ends: Mapping[int, list[tuple[str, int]]]
) -> Mark | Refused:
    if not text:
        return Refused(text, "it is empty")
    if index not in good:
        return Refused(text, "the template changes its text")
    found = ends.get(index, [])
    if [end for end, _ in found] != ["a", "z"]:
        times = sum(end == "a" for end, _ in found)
        return Refused(text, f"the template has it {times} times")
    return Mark(found[0][1], found[1][1])


def _replaced(value: Any, text_of: Callable[[Marked], str]) -> Any:
    """Messages in which parts, and lists of parts and text, are text."""
    if is_part(value):
        return text_of(marked(value))
    if isinstance(value, Mapping):
        return {name: _replaced(inner, text_of) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        mixed = all(isinstance(inner, str) or is_part(inner) for inner in value)
        if mixed and any(map(is_part, value)):
            return text_of(marked(value))
        return [_replaced(inner, text_of) for inner in value]
    return value
