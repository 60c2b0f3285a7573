"""Answers, compared strictly with what OpenAI documents: the pydantic types of its client."""

from __future__ import annotations

import json
from functools import cache

from openai import BaseModel
from pydantic import TypeAdapter


def conforms(kind, given, allowed=()):
    """The JSON of an answer as one of OpenAI's types. It has no value of another type, and no field
    that is not documented but those `allowed`."""
    found = _adapter(kind).validate_json(json.dumps(given), strict=True)
    unknown = set(_undocumented(found)) - set(allowed)
    assert not unknown, f"not documented: {unknown}"
    return found


@cache
def _adapter(kind):
    return TypeAdapter(kind)


def _undocumented(value):
    if isinstance(value, BaseModel):
        yield from value.model_extra or ()
        for name in type(value).model_fields:
            yield from _undocumented(getattr(value, name))
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _undocumented(one)
    elif isinstance(value, dict):
        for one in value.values():
            yield from _undocumented(one)
