"""Structures: the schemas and grammars that a request may ask its answers to follow."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from kvkeep.serve.requests.fields import Exact, Flag, Text

StructureKind = Literal["lark", "grammar", "json_schema", "regex", "choice"]
"""Kinds of grammars, as llguidance names them."""


class Structure(NamedTuple):
    """A grammar, and the field of a request that has it."""

    field: str
    kind: StructureKind
    text: str


class OneOf(NamedTuple):
    """One of several texts."""

    texts: list[str]


class Until(NamedTuple):
    """Any text of a number of characters (None: no limit), up to and with a text that ends it."""

    end: str
    least: int
    most: int | None


class Perhaps(NamedTuple):
    """Pieces of which all may be left out together."""

    pieces: list[Piece]


Piece = str | dict[str, Any] | OneOf | Until | Perhaps
"""A piece of a text that a grammar describes: a text, the JSON schema of a value, or one of the
above."""


class JSONSchema(Exact):
    """A JSON schema, as OpenAI's API has it. Answers always follow it."""

    name: Text = ""
    description: Text | None = None
    given: Annotated[dict[Any, Any], Field(alias="schema")]
    strict: Flag = True


class ResponseFormat(Exact):
    """What answers look like."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JSONSchema | None = None
