"""Blocks in chat messages: marks locate them in the text that a chat template renders."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any
from uuid import uuid4

from kvkeep.blocks.parts import Mark, Marked, Refused, is_part, marked

_Render = Callable[[Any], str]


class Marks:
    """Marks around blocks: letters and digits, which templates do not change, drawn at random for
    each rendering, so that no text contains them by chance.

    Args:
        wanted: whether a block gets marks, by its index in the order of `put`.
    """

    def __init__(self, wanted: Callable[[int], bool] = lambda _: True) -> None:
        self._name = uuid4().hex
        self._pattern = re.compile(f"{self._name}([az])([0-9]+)q")
        self._wanted = wanted
        self.texts: list[str] = []

    def put(self, text: Marked) -> str:
        """The text, with marks around its wanted blocks."""
        first = len(self.texts)
        self.texts += [text.text[mark.start : mark.stop] for mark in text.marks]
        ends: list[tuple[int, int, int, str]] = []
        for index, mark in enumerate(text.marks, first):
            if self._wanted(index) and mark.stop > mark.start:
                # Order at the same character: inner ends, outer ends, outer starts, inner starts.
                ends.append((mark.start, 1, index, f"{self._name}a{index}q"))
                ends.append((mark.stop, 0, -index, f"{self._name}z{index}q"))
        pieces, last = list[str](), 0
        for at, _, _, mark_text in sorted(ends):
            pieces += [text.text[last:at], mark_text]
            last = at
        return "".join([*pieces, text.text[last:]])

    def removed(self, rendered: str) -> tuple[str, dict[int, list[tuple[str, int]]]]:
        """Remove the marks from a rendered text.

        Returns:
            The text without marks; and the marks found, by index of the block: kind ("a" start, "z"
            end) and character index.
        """
        pieces, last, length = list[str](), 0, 0
        marks: dict[int, list[tuple[str, int]]] = {}
        for match in self._pattern.finditer(rendered):
            pieces.append(rendered[last : match.start()])
            length += len(pieces[-1])
            marks.setdefault(int(match[2]), []).append((match[1], length))
            last = match.end()
        return "".join([*pieces, rendered[last:]]), marks


def rendered(given: Mapping[str, Any], render: _Render) -> tuple[str, list[Mark | Refused]]:
    """Render messages, tools and other arguments that contain parts.

    Args:
        given: arguments of `render`, with parts instead of text.
        render: renders arguments that contain plain text only.

    Returns:
        See `located`.
    """
    return located(lambda marks: render(_replaced(given, marks.put)))


def located(render: Callable[[Marks], str]) -> tuple[str, list[Mark | Refused]]:
    """Locate blocks in a rendered text.

    Args:
        render: renders the text and passes each block through `Marks.put`. It is called several
            times, and must pass the same blocks in the same order each time.

    Returns:
        The text rendered without marks; and for each block its location, or why it is refused. A
        nested block follows the block that contains it.
    """
    none = Marks(lambda _: False)
    plain = render(none)
    good = set(range(len(none.texts)))
    for attempt in range(2):
        marks = Marks(frozenset(good).__contains__)
        bare, ends = marks.removed(render(marks))
        if bare == plain:
            break
        if attempt == 0:  # the template changes a block: test each block separately
            good = {index for index in good if _left_alone(index, render, plain)}
        else:
            good, ends = set(), {}
    return plain, [_mark_of(text, index, good, ends) for index, text in enumerate(none.texts)]


def _left_alone(index: int, render: Callable[[Marks], str], plain: str) -> bool:
    marks = Marks(index.__eq__)
    return marks.removed(render(marks))[0] == plain


def _mark_of(
    text: str, index: int, good: set[int], ends: Mapping[int, list[tuple[str, int]]]
) -> Mark | Refused:
    if not text:
        return Refused(text, "it is empty")
    if index not in good:
        return Refused(text, "the template changes its text")
    own = ends.get(index, [])
    if [end for end, _ in own] != ["a", "z"]:
        times = sum(end == "a" for end, _ in own)
        return Refused(text, f"the template has it {times} times")
    return Mark(own[0][1], own[1][1])


def _replaced(value: Any, text_of: Callable[[Marked], str]) -> Any:
    """A copy in which parts, and lists of parts and text, are replaced by text."""
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
