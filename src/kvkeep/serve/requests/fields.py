"""Fields: the types that the fields of requests have."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, Strict
from pydantic import model_validator as validator

_MEDIA = re.compile("audio|video|file")
_MOST_INT = 2**63 - 1  # Python refuses to print integers of many digits


class UnsupportedValueError(ValueError):
    """A value that would change the answer, of a field that is not supported."""


def only(*allowed: Any) -> AfterValidator:
    """Refuses all values but a few of this type: False is not 0."""

    def check(given: Any) -> Any:
        if (type(given), given) not in [(type(one), one) for one in allowed]:
            give = " or ".join(map(json.dumps, [*allowed, None]))
            raise UnsupportedValueError(f"give {give}, all else is not supported")
        return given

    return AfterValidator(check)


def _not_media(given: Any) -> Any:
    if isinstance(given, str) and _MEDIA.search(given):
        raise UnsupportedValueError("this server gives models text and images only; leave it out")
    return given


NO_MEDIA = BeforeValidator(_not_media)
"""For the type of a message's part: refuses sound, videos and files."""


def at_most(count: int, items: str) -> BeforeValidator:
    """Refuses objects of more fields, before they are read."""

    def check(given: Any) -> Any:
        if isinstance(given, dict) and len(given) > count:
            raise ValueError(f"give at most {count} {items}")
        return given

    return BeforeValidator(check)


def tag(given: Any) -> str:
    """The tag of a text or a list, where a field may be either."""
    return "(list)" if isinstance(given, list) else "(text)"


def object_tag(given: Any) -> str:
    """The tag of a text or an object."""
    return "(object)" if isinstance(given, dict) else "(text)"


TAGS = ("(text)", "(list)", "(object)")
"""All tags; pydantic puts them into the paths of errors."""


def _whole(given: Any) -> Any:
    """JavaScript and some templates write 16 as 16.0."""
    return int(given) if isinstance(given, float) and given.is_integer() else given


def _as_list(given: Any) -> Any:
    return [given] if isinstance(given, str) else given


Text = Annotated[str, Strict(), Field(min_length=0)]  # with a bound pydantic checks its Unicode
Flag = Annotated[bool, Strict()]
Integer = Annotated[int, Strict(), BeforeValidator(_whole), Field(ge=-_MOST_INT - 1, le=_MOST_INT)]
Count = Annotated[Integer, Field(ge=1)]
Number = Annotated[float, Strict()]
Penalty = Annotated[Number, Field(ge=-2, le=2)]
Token = Annotated[Integer, Field(ge=0)]
Stop = Annotated[Text, Field(min_length=1, max_length=1000)]  # new text is compared with each of it
Stops = Annotated[list[Stop], Field(max_length=4), BeforeValidator(_as_list)]
TokenId = Annotated[Text, Field(pattern="^(0|[1-9][0-9]{0,9})$")]
Bias = Annotated[Number, Field(ge=-100, le=100)]
Ignored = Annotated[Any, Field(description="Ignored.")]
Refused = Annotated[Any, only(), Field(description="Refused.")]
FirstError = Field(fail_fast=True)  # pydantic keeps each error, of which a large list has many


class Lenient(BaseModel):
    """A JSON object whose unknown fields are ignored, and whose fields that are null are left
    out."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    @validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        if isinstance(given, dict):
            return {name: value for name, value in given.items() if value is not None}
        return given


class Exact(Lenient):
    """A JSON object without unknown fields; fields that are null are left out."""

    model_config = ConfigDict(extra="forbid")
