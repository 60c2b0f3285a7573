"""Structures: the schemas and grammars that a request may ask its answers to follow."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from kvkeep.serve.fields import Exact, Flag, Text

StructureKind = Literal["lark", "grammar", "json_schema", "regex", "choice"]
"""Kinds of grammars, as llguidance names them."""


class Structure(NamedTuple):
    """A grammar, and the field of a request that has it."""

    field: str
    kind: StructureKind
    text: str


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
