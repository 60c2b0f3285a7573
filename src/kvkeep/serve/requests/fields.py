"""Fields: types of request fields."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, Strict
from pydantic import model_validator as validator

_MEDIA = re.compile("audio|video|file")
_MOST_INT = 2**63 - 1  # Python refuses to print very long integers


class UnsupportedValueError(ValueError):
    """An unsupported value that would change the answer."""


def only(*allowed: Any) -> AfterValidator:
    """Accept only these values. Types must match: False is not 0."""

    def check(given: Any) -> Any:
        if (type(given), given) not in [(type(one), one) for one in allowed]:
            give = " or ".join(map(json.dumps, [*allowed, None]))
            raise UnsupportedValueError(f"give {give}; other values are not supported")
        return given

    return AfterValidator(check)


def _not_media(given: Any) -> Any:
    if isinstance(given, str) and _MEDIA.search(given):
        raise UnsupportedValueError("this server supports only text and images; leave it out")
    return given


NO_MEDIA = BeforeValidator(_not_media)
"""Refuses audio, video and file parts of a message, by their type."""


def at_most(count: int, items: str) -> BeforeValidator:
    """Refuse objects with more fields before pydantic reads them."""

    def check(given: Any) -> Any:
        if isinstance(given, dict) and len(given) > count:
            raise ValueError(f"give at most {count} {items}")
        return given

    return BeforeValidator(check)


def tag(given: Any) -> str:
    """The tag of a value that is a text or a list."""
    return "(list)" if isinstance(given, list) else "(text)"


def object_tag(given: Any) -> str:
    """The tag of a value that is a text or an object."""
    return "(object)" if isinstance(given, dict) else "(text)"


TAGS = ("(text)", "(list)", "(object)")
"""All tags; pydantic includes them in the locations of errors."""


def _whole(given: Any) -> Any:
    """A float without a fraction as an integer: JavaScript and some templates write 16 as 16.0."""
    return int(given) if isinstance(given, float) and given.is_integer() else given


def _as_list(given: Any) -> Any:
    return [given] if isinstance(given, str) else given


Text = Annotated[str, Strict(), Field(min_length=0)]  # with a bound pydantic checks the Unicode
Flag = Annotated[bool, Strict()]
Integer = Annotated[int, Strict(), BeforeValidator(_whole), Field(ge=-_MOST_INT - 1, le=_MOST_INT)]
Count = Annotated[Integer, Field(ge=1)]
Number = Annotated[float, Strict()]
Penalty = Annotated[Number, Field(ge=-2, le=2)]
Token = Annotated[Integer, Field(ge=0)]
Stop = Annotated[Text, Field(min_length=1, max_length=1000)]  # new text is compared with each
Stops = Annotated[list[Stop], Field(max_length=4), BeforeValidator(_as_list)]
TokenId = Annotated[Text, Field(pattern="^(0|[1-9][0-9]{0,9})$")]
Bias = Annotated[Number, Field(ge=-100, le=100)]
Ignored = Annotated[Any, Field(description="Ignored.")]
Refused = Annotated[Any, only(), Field(description="Refused.")]
FirstError = Field(fail_fast=True)  # pydantic keeps all errors of a list


class Lenient(BaseModel):
    """A JSON object; unknown fields and null fields are ignored."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    @validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        if isinstance(given, dict):
            return {name: value for name, value in given.items() if value is not None}
        return given


class Exact(Lenient):
    """A JSON object that refuses unknown fields; null fields are ignored."""

    model_config = ConfigDict(extra="forbid")
