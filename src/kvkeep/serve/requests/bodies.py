"""Bodies: parse a request's JSON; an error names the field at fault."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import ValidationError

from kvkeep.serve.refused import RequestError
from kvkeep.serve.requests.fields import TAGS, Exact, UnsupportedValueError

_NAMED_WHOLE = ("logit_bias", "prompt", "stop", "tool_choice")  # errors name the whole field

_Request = TypeVar("_Request", bound=Exact)


def read(body: bytes | bytearray, kind: type[_Request]) -> _Request:
    """Parse the body of a request.

    Raises:
        RequestError: the body is not JSON, or a field is unknown, wrong or unsupported.
    """
    try:
        given = json.loads(body, object_pairs_hook=_object, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is not JSON: {error}") from None
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        raise _refused(error.errors(include_url=False)[0]) from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse repeated names: JSON parsers differ in which value they keep."""
    given = dict(pairs)
    if len(given) < len(pairs):
        twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"an object has the name {json.dumps(twice)[:80]} twice")
    return given


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a valid number")


def _refused(problem: Mapping[str, Any]) -> RequestError:
    """The RequestError for an error of pydantic: field, value and remedy."""
    path = [part for part in problem["loc"] if part not in (*TAGS, "[key]")]
    where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)[1:81]
    param = path[0] if path and path[0] in _NAMED_WHOLE else where
    if problem["type"] == "missing":
        message = f"{where} is missing; give it"
        return RequestError(message, str(param), "missing_required_parameter")
    if problem["type"] == "extra_forbidden":
        message = f"{where} is not a field that this server knows; leave it out"
        return RequestError(message, str(param), "unknown_parameter")
    error = problem.get("ctx", {}).get("error")  # raised by a validator of this package
    wanted = str(error or problem["msg"][0].lower() + problem["msg"][1:])
    message = f"{where or 'the JSON body'} is {_shown(problem['input'])}: {wanted}"
    code = "unsupported_parameter" if isinstance(error, UnsupportedValueError) else None
    return RequestError(message, str(param) or None, code)


def _shown(value: Any) -> str:
    """A value for an error message. Lists and objects may be nested too deeply to print."""
    if isinstance(value, list | dict):
        return "an object" if isinstance(value, dict) else f"a list of length {len(value)}"
    return json.dumps(value)[:80]
