"""Locate texts marked for reuse in the prompts that Mellea renders."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from threading import Lock, get_ident
from typing import Any, TypeVar, cast, final

from kvkeep.blocks import Block, Encoded
from kvkeep.blocks.chat import Marks, located
from kvkeep.blocks.parts import Mark, Refused, marked
from kvkeep.blocks.tokenize import SHORTEST, tokenized
from kvkeep.errors import SpecError
from kvkeep.extras import needed_by

with needed_by("kvkeep.mellea", "mellea"):
    from mellea.core import CBlock, Component, Span
    from mellea.formatters import ChatFormatter
    from mellea.stdlib.components import Document, Message

_LOST = "no message of the prompt contains it"
_MARKED = "_kvkeep_cached"  # attribute of marked components
_READING = Lock()
_S = TypeVar("_S", bound="CBlock | Component[Any]")


def cached(part: _S) -> _S:
    """Mark a part of prompts for reuse, as `cache=True` marks a `CBlock`. The text that Mellea
    renders for it becomes a block.

    Args:
        part: a component, such as a `Message` or a `Document`, or a `CBlock`.

    Returns:
        The same part.

    Raises:
        SpecError: it is neither a component nor a `CBlock`.
    """
    if isinstance(part, CBlock):
        part.cache = True
    elif isinstance(part, Component):
        setattr(part, _MARKED, True)
    else:
        raise SpecError(
            f"{type(part).__name__} is not a prompt's part; give a CBlock or a component such as "
            "Document(text)"
        )
    return part


@final
class Reader:
    """Renders parts with marks around the parts to reuse.

    Args:
        formatter: renders parts as Mellea does.
        marks: the marks of this rendering.

    Attributes:
        formatter: a formatter that renders parts with marks.
        keys: for each of `marks.texts`, the key of its marked part.
    """

    def __init__(self, formatter: ChatFormatter, marks: Marks) -> None:
        self.marks, self.keys = marks, list[Hashable]()
        self.formatter = copy(formatter)
        # TemplateFormatter renders nested parts by another method.
        method = "_stringify" if hasattr(formatter, "_stringify") else "print"
        plain = getattr(type(formatter), method)

        def render(part: Any) -> Any:
            text = plain(self.formatter, part)
            return self.marked(id(part), text) if _is_marked_component(part) else text

        setattr(self.formatter, method, render)

    def marked(self, key: Hashable, text: str) -> str:
        """A part's text with marks around it; `key` identifies the part."""
        if not text.strip():
            return text
        self.keys.append(key)
        return self.marks.put(marked(Block(text)))

    def message(self, message: Message) -> Message:
        """A message with marks around its text and its documents' texts if they are marked.
        Adapters read these attributes without a formatter."""
        (content, *_), twin = message.parts(), copy(message)
        if _is_marked_component(message):
            twin.content = self.marked(id(message), message.content)
        elif isinstance(content, CBlock) and content.cache:
            twin.content = self.marked(message.content.strip(), message.content)
        twin._docs = message._docs and list(map(self._document, message._docs))
        return twin

    def _document(self, document: Document) -> Document:
        if not _is_marked_component(document):
            return document
        twin = copy(document)
        twin.text = self.marked(id(document), document.text)
        return twin


def encoded(
    tokenizer: Any,
    formatter: ChatFormatter,
    spans: Sequence[Span],
    render: Callable[[Reader], str],
    *,
    special: bool,
) -> Encoded | None:
    """The tokens and blocks of a prompt; None if nothing in it is marked.

    Args:
        spans: the parts of the prompt.
        render: renders the prompt as Mellea will, by the reader's formatter.
        special: whether the tokenizer adds its special tokens.
    """
    wanted = {_key_of(part): part for span in spans for part in _marked_in(span)}
    if not wanted:
        return None
    readers: list[Reader] = []

    def with_marks(marks: Marks) -> str:
        readers.append(reader := Reader(formatter, marks))
        with _reading(reader):
            return render(reader)

    text, locations = located(with_marks)
    # A component may read a text more often than it renders it, so some reads have no location.
    read = list(zip(readers[0].keys, locations, strict=True))
    placed = {key for key, place in read if isinstance(place, Mark)}
    lost = {
        key: Refused(formatter.print(part).strip(), _LOST)
        for key, part in wanted.items()
        if key not in placed
    }
    lost |= {key: place for key, place in read if isinstance(place, Refused) and key not in placed}
    places = sorted(
        (place for _, place in read if isinstance(place, Mark)),
        key=lambda place: (place.start, -place.stop),
    )
    marks: list[Mark | Refused] = [*places, *lost.values()]
    return Encoded(*tokenized(tokenizer, text, marks, special=special, shortest=SHORTEST))


def _is_marked_component(part: Any) -> bool:
    return isinstance(part, Component) and getattr(part, _MARKED, False) is True


def _key_of(part: Span) -> Hashable:
    """The identity of a marked part: a block's text, since components may create blocks anew."""
    return (part.value or "").strip() if isinstance(part, CBlock) else id(part)


def _marked_in(span: Span) -> Iterator[Span]:
    """The marked parts in a span."""
    if isinstance(span, CBlock):
        if span.cache and span.value and span.value.strip():
            yield span
    elif isinstance(span, Component):
        if _is_marked_component(span):
            yield span
        for part in span.parts():
            yield from _marked_in(part)


@contextmanager
def _reading(reader: Reader) -> Iterator[None]:
    """A context in which `value` of a marked CBlock returns its text with marks around it.

    Components render blocks in different ways, but all read `value`, so blocks are recognised
    there. Other threads read the plain text.
    """
    thread, plain = get_ident(), cast(property, vars(CBlock)["value"])
    read = plain.fget
    assert read is not None

    def value(block: CBlock) -> str | None:
        text: str | None = read(block)
        if get_ident() == thread and block.cache and text:
            return reader.marked(text.strip(), text)
        return text

    with _READING:
        CBlock.value = property(value, plain.fset)  # type: ignore[assignment, method-assign]
        try:
            yield
        finally:
            CBlock.value = plain  # type: ignore[assignment, method-assign]
