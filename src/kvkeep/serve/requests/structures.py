"""Structures: schemas and grammars for structured output."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from kvkeep.serve.requests.fields import Exact, Flag, Text

StructureKind = Literal["lark", "grammar", "json_schema", "regex", "choice"]
"""Grammar kinds by llguidance's names."""


class Structure(NamedTuple):
    """A grammar, and the request field that contains it."""

    field: str
    kind: StructureKind
    text: str


class OneOf(NamedTuple):
    """One of several texts."""

    texts: list[str]


class Until(NamedTuple):
    """Any text up to and including an end mark, of bounded length (None: no limit)."""

    end: str
    least: int
    most: int | None


class Perhaps(NamedTuple):
    """Pieces that are optional together."""

    pieces: list[Piece]


Piece = str | dict[str, Any] | OneOf | Until | Perhaps
"""A piece of a text in a grammar: a literal, a value's JSON schema, or one of these classes."""


class JSONSchema(Exact):
    """A JSON schema in OpenAI's format. Answers always follow it, also with `strict` false."""

    name: Text = ""
    description: Text | None = None
    given: Annotated[dict[Any, Any], Field(alias="schema")]
    strict: Flag = True


class ResponseFormat(Exact):
    """The format of answers."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JSONSchema | None = None
