"""Parts of a prompt: text, blocks to reuse, and components made of both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Union, runtime_checkable

from kvkeep.errors import SpecError


@runtime_checkable
class Component(Protocol):
    """An object made of parts, such as a tool with its description or a page of documents."""

    def parts(self) -> Sequence[Part]:
        """The parts, in order."""


@dataclass(frozen=True)
class Text:
    """Text that is computed in place, in its prompt."""

    text: str


@dataclass(frozen=True)
class Block:
    """A part that occurs in several prompts, maybe at different places.

    Args:
        content: text or other parts. If this block cannot be reused, nested blocks may be.
        use_cache: whether to reuse the block; False: treat it as text.
    """

    content: Part | Sequence[Part]
    use_cache: bool = True

    def parts(self) -> Sequence[Part]:
        """Its content."""
        return listed(self.content)


Part = Union[str, Text, Block, Component]  # noqa: UP007 - Block's content is a forward reference


@dataclass(frozen=True)
class Mark:
    """Location of a block in a text: characters `start` to `stop`, exclusive, without surrounding
    white space."""

    start: int
    stop: int


@dataclass(frozen=True)
class Refused:
    """A block that is not reused: its text, and the reason."""

    text: str
    reason: str


@dataclass
class Marked:
    """A text and the locations of its blocks. A nested block follows the block that contains it."""

    text: str = ""
    marks: list[Mark] = field(default_factory=list)

    def add(self, part: Part | Sequence[Part]) -> None:
        """Append a part.

        Raises:
            SpecError: the value is not a part.
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
                f"{type(part).__name__} is not a part of a prompt; give text, Text, Block, or an "
                "object with parts()"
            )

    def _add_block(self, block: Block) -> None:
        index, start = len(self.marks), len(self.text)
        self.add(block.parts())
        if block.use_cache:
            content = self.text[start:]
            start += len(content) - len(content.lstrip())
            stop = max(start, len(self.text.rstrip()))
            self.marks.insert(index, Mark(start, stop))


def is_part(value: Any) -> bool:
    """Whether a value is a part other than plain text."""
    made = callable(getattr(value, "parts", None)) and not isinstance(value, type)
    return made or isinstance(value, Text)


def marked(part: Part | Sequence[Part]) -> Marked:
    """The text of some parts, and the locations of its blocks.

    Raises:
        SpecError: a value is not a part.
    """
    whole = Marked()
    whole.add(part)
    return whole


def listed(content: Part | Sequence[Part]) -> Sequence[Part]:
    """One part, or several parts, as a sequence."""
    if isinstance(content, Sequence) and not isinstance(content, str):
        return content
    return [content]
