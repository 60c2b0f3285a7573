"""Parts of a prompt: text, blocks that are worth keeping, and components that are made of both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Union, runtime_checkable

from kvkeep.errors import SpecError


@runtime_checkable
class Component(Protocol):
    """What is made of parts, such as a tool with its description, or a page of documents."""

    def parts(self) -> Sequence[Part]:
        """What it is made of, in order."""


@dataclass(frozen=True)
class Text:
    """Text that is read where it stands."""

    text: str


@dataclass(frozen=True)
class Block:
    """A part that other prompts will have too, perhaps in another place.

    Args:
        content: text or other parts, blocks as well: where this one cannot be reused, they may.
        use_cache: False for one that is only read.
    """

    content: Part | Sequence[Part]
    use_cache: bool = True

    def parts(self) -> Sequence[Part]:
        """Its content."""
        return listed(self.content)


Part = Union[str, Text, Block, Component]  # noqa: UP007 - Block's content is a forward reference


@dataclass(frozen=True)
class Mark:
    """A block in a text: from character `start` to before `stop`, without the spaces around it."""

    start: int
    stop: int


@dataclass(frozen=True)
class Refused:
    """A block that is not reused: its text, and why."""

    text: str
    reason: str


@dataclass
class Marked:
    """A text, and where its blocks are, those inside others behind them."""

    text: str = ""
    marks: list[Mark] = field(default_factory=list)

    def add(self, part: Part | Sequence[Part]) -> None:
        """Put a part behind the others.

        Raises:
            SpecError: it is no part.
        """
        if isinstance(part, str):
            self.text += part
        elif isinstance(part, Text):
            self.text += part.text
        elif isinstance(part, Block):
            self._add_block(part)
        elif isinstance(part, Sequence):
            for inner in part:
                self.add(inner)
        elif is_part(part):
            self.add(part.parts())
        else:
            raise SpecError(
                f"{type(part).__name__} is no part of a prompt; give text, Text, Block, or an "
                "object with parts()"
            )

    def _add_block(self, block: Block) -> None:
        place, start = len(self.marks), len(self.text)
        self.add(block.parts())
        if block.use_cache:
            content = self.text[start:]
            start += len(content) - len(content.lstrip())
            stop = max(start, len(self.text.rstrip()))
            self.marks.insert(place, Mark(start, stop))


def is_part(value: Any) -> bool:
    """Whether a value is a part other than plain text."""
    made = callable(getattr(value, "parts", None)) and not isinstance(value, type)
    return made or isinstance(value, Text)


def marked(part: Part | Sequence[Part]) -> Marked:
    """The text of some parts, and where its blocks are.

    Raises:
        SpecError: something is no part.
    """
    found = Marked()
    found.add(part)
    return found


def listed(content: Part | Sequence[Part]) -> Sequence[Part]:
    """Parts, of one or several."""
    if isinstance(content, Sequence) and not isinstance(content, str):
        return content
    return [content]
