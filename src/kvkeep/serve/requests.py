"""Parse requests from JSON. Each field of OpenAI's API is supported, has no effect here, or is
refused by name."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvkeep.errors import KVKeepError

_ROLES = {
    "system": "system",
    "developer": "system",  # the role that chat templates support
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
_MOST_STOPS = 4
_LONGEST_STOP = 1000  # characters: each new piece of text is compared with every prefix of it
_MOST_CHOICES = 128
_MOST_INT = 2**63 - 1  # Python refuses to print integers of many digits
_LEAST_TEMPERATURE = 1e-4  # below it decoding is greedy: dividing logits by it would overflow
_DEFAULT_COMPLETION = 16  # tokens, OpenAI's default for completions
_MOST_BIASES = 1024
_TOKEN_ID = re.compile(r"0|[1-9]\d{0,9}", re.ASCII)
_OFF_IN_CHAT: Mapping[str, tuple[Any, ...]] = {
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "functions": ([],),
    "function_call": ("none",),
    "tool_choice": ("auto", "none"),
}
_OFF_IN_COMPLETIONS: Mapping[str, tuple[Any, ...]] = {
    "echo": (False,),
    "best_of": (1,),
    "suffix": ("",),
}

Message = dict[str, Any]


class RequestError(KVKeepError):
    """A refused request. It has a message, the field and code at fault, the HTTP status, and after
    how many seconds to retry."""

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        status: int = 400,
        retry_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.param, self.code, self.status, self.retry_s = param, code, status, retry_s

    def body(self) -> dict[str, Any]:
        """The error in the format of OpenAI's API."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = "rate_limit_error" if self.status == 429 else kind
        about = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": about}


@dataclass(frozen=True)
class Asked:
    """One request: a chat with `messages` (`chat=True`), or a `prompt` to continue, text or token
    ids. `max_tokens=None` allows as many as the model's context and the server's limit permit.
    `logprobs` asks for those of each token, and `top_logprobs` for those of so many others too.
    `include_cache` asks for pictures of the cache in the stream."""

    chat: bool
    model: str
    messages: list[Message]
    prompt: str | list[int]
    tools: list[Any] | None
    max_tokens: int | None
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    logprobs: bool
    top_logprobs: int
    stop: tuple[str, ...]
    seed: int | None
    n: int
    stream: bool
    include_usage: bool
    include_cache: bool

    @property
    def param(self) -> str:
        """The name of the field with the prompt."""
        return "messages" if self.chat else "prompt"

    def without_prompt(self) -> Asked:
        """A copy without the prompt, which may be large and is not needed once it is tokenised."""
        return replace(self, messages=[], prompt="", tools=None)


def read(body: bytes | bytearray, *, chat: bool) -> Asked:
    """Parse the body of a request, for chat or for plain completions.

    Raises:
        RequestError: the body is not JSON, or a field is wrong or unsupported.
    """
    try:
        given = json.loads(body, object_pairs_hook=_object, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is not JSON: {error}") from None
    if not isinstance(given, dict):
        raise RequestError(f"the body is {_kind(given)}; give a JSON object")
    for name, off in (_OFF_IN_CHAT if chat else _OFF_IN_COMPLETIONS).items():
        if given.get(name) is not None and not _is_among(given[name], off):
            only = " or ".join([*map(json.dumps, off), "null"])
            raise RequestError(
                f"{name} {json.dumps(given[name])[:80]} is not supported here; leave it out, or "
                f"give {only}",
                param=name,
                code="unsupported_parameter",
            )
    tokens = None if chat else _DEFAULT_COMPLETION
    for name in ("max_tokens", "max_completion_tokens") if chat else ("max_tokens",):
        tokens = _integer(given, name, tokens, 1)
    temperature = _number(given, "temperature", 1.0, 2.0)
    options = _field(given, "stream_options", dict, {})
    logprobs, top_logprobs = _logprobs(given, chat)
    stream = _field(given, "stream", bool, False)
    n = _integer(given, "n", 1, 1, _MOST_CHOICES) or 1
    include_cache = _field(options, "include_cache", bool, False, "stream_options.")
    if include_cache and (n > 1 or not stream):
        raise RequestError(
            "stream_options.include_cache shows the cache of one answer while it is streamed; "
            "give stream true and n 1, or leave it out",
            param="stream_options.include_cache",
        )
    return Asked(
        chat=chat,
        model=_required(given, "model", str),
        messages=_conversation(given) if chat else [],
        prompt="" if chat else _prompt(given),
        tools=_tools(given) if chat else None,
        max_tokens=tokens,
        temperature=temperature if temperature >= _LEAST_TEMPERATURE else 0.0,
        top_p=_number(given, "top_p", 1.0, 1.0),
        top_k=_integer(given, "top_k", 0, 0) or 0,
        min_p=_number(given, "min_p", 0.0, 1.0),
        presence_penalty=_number(given, "presence_penalty", 0.0, 2.0, -2.0),
        frequency_penalty=_number(given, "frequency_penalty", 0.0, 2.0, -2.0),
        logit_bias=_biases(given),
        logprobs=logprobs,
        top_logprobs=top_logprobs,
        stop=_stop(given),
        seed=_integer(given, "seed", None, -(2**63)),
        n=n,
        stream=stream,
        include_usage=_field(options, "include_usage", bool, False, "stream_options."),
        include_cache=include_cache,
    )


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse a repeated name, for which other programs may use the other value."""
    given = dict(pairs)
    if len(given) < len(pairs):
        twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"an object has the name {json.dumps(twice)[:80]} twice")
    return given


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a valid number")


def _conversation(given: Mapping[str, Any]) -> list[Message]:
    messages = _required(given, "messages", list)
    if not messages:
        raise RequestError("messages is empty; give at least one", param="messages")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _message(given: Any, where: str) -> Message:
    if not isinstance(given, dict):
        raise RequestError(f"{where} is {_kind(given)}; give an object", param=where)
    said = given.get("role")
    role = _ROLES.get(said) if isinstance(said, str) else None
    if role is None:
        raise RequestError(
            f"{where}.role {json.dumps(said)[:80]} is unknown; give one of {', '.join(_ROLES)}",
            param=f"{where}.role",
        )
    for name in ("audio", "function_call"):
        if given.get(name) is not None:
            raise _refused(f"{where}.{name}")
    calls = _field(given, "tool_calls", list, [], f"{where}.")
    content = given.get("content")
    if content is None and role == "assistant":
        content = ""
    message: Message = {"role": role, "content": _content(content, f"{where}.content")}
    if calls and role == "assistant":
        message["tool_calls"] = [
            _call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)
        ]
    if role == "tool":
        for name in ("tool_call_id", "name"):
            if name in given:
                message[name] = _text(given[name], f"{where}.{name}")
    return message


def _content(given: Any, where: str) -> str:
    if not isinstance(given, list):
        return _text(given, where)
    texts = []
    for i, part in enumerate(given):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise RequestError(
                f"{where}[{i}] is of type {json.dumps(kind)[:80]}; this model reads text only",
                param=f"{where}[{i}].type",
            )
        texts.append(_text(part.get("text"), f"{where}[{i}].text"))
    return "".join(texts)


def _call(given: Any, where: str) -> dict[str, Any]:
    """A tool call with its arguments as an object, which is what chat templates expect."""
    function = given.get("function") if isinstance(given, dict) else None
    if not isinstance(function, dict):
        raise RequestError(f"{where} has no function; only functions can be called", param=where)
    text = function.get("arguments", "{}")
    try:
        arguments = json.loads(text) if isinstance(text, str) else text
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise RequestError(
            f"{where}.function.arguments is not a JSON object",
            param=f"{where}.function.arguments",
        )
    name = _text(function.get("name"), f"{where}.function.name")
    identity = given.get("id")
    return {
        "type": "function",
        "function": {"name": name, "arguments": arguments},
        **({} if identity is None else {"id": _text(identity, f"{where}.id")}),
    }


def _tools(given: Mapping[str, Any]) -> list[Any] | None:
    tools: list[Any] = _field(given, "tools", list, [])
    for i, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RequestError(
                f"tools[{i}] is not a function with a name; give one", param=f"tools[{i}]"
            )
    return tools if tools and given.get("tool_choice") != "none" else None


def _prompt(given: Mapping[str, Any]) -> str | list[int]:
    prompt = given.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
        return prompt
    if isinstance(prompt, list):
        raise RequestError(
            f"prompt is a list of {len(prompt)} items; give one text, or the token ids of one",
            param="prompt",
        )
    text = _text(prompt, "prompt")
    if not text:
        raise RequestError("prompt is empty; give some text", param="prompt")
    return text


def _logprobs(given: Mapping[str, Any], chat: bool) -> tuple[bool, int]:
    """Whether logprobs are asked for, and of how many of the likeliest tokens."""
    if not chat:
        top = _integer(given, "logprobs", None, 0, 5)
        return top is not None, top or 0
    asked, top = _field(given, "logprobs", bool, False), _integer(given, "top_logprobs", 0, 0, 20)
    if top and not asked:
        raise RequestError(
            f"top_logprobs {top} without logprobs; give logprobs true too", param="top_logprobs"
        )
    return asked, top or 0


def _biases(given: Mapping[str, Any]) -> dict[int, float]:
    biases = _field(given, "logit_bias", dict, {})
    if len(biases) > _MOST_BIASES:
        raise RequestError(
            f"logit_bias of {len(biases)} tokens; give at most {_MOST_BIASES}", param="logit_bias"
        )
    for token in biases:
        if not _TOKEN_ID.fullmatch(token):
            raise RequestError(
                f'logit_bias has {json.dumps(token)[:80]}; give token ids, such as "50"',
                param="logit_bias",
            )
    return {
        int(token): _number(biases, token, 0.0, 100.0, -100.0, param="logit_bias")
        for token in biases
    }


def _stop(given: Mapping[str, Any]) -> tuple[str, ...]:
    stop = given.get("stop")
    strings = [] if stop is None else stop if isinstance(stop, list) else [stop]
    if len(strings) > _MOST_STOPS:
        raise RequestError(f"{len(strings)} stop strings; give at most {_MOST_STOPS}", param="stop")
    texts = tuple(_text(string, "stop") for string in strings)
    if not all(texts):
        raise RequestError("a stop string is empty; leave it out", param="stop")
    longest = max(map(len, texts), default=0)
    if longest > _LONGEST_STOP:
        raise RequestError(
            f"a stop string of {longest} characters; give at most {_LONGEST_STOP}", param="stop"
        )
    return texts


def _text(given: Any, where: str) -> str:
    if not isinstance(given, str):
        raise RequestError(f"{where} is {_kind(given)}; give text", param=where)
    try:
        given.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"{where} is not valid Unicode: {error}", param=where) from None
    return given


def _required(given: Mapping[str, Any], name: str, kind: type[Any]) -> Any:
    if given.get(name) is None:
        raise RequestError(f"{name} is missing", param=name, code="missing_required_parameter")
    return _field(given, name, kind, None)


def _field(
    given: Mapping[str, Any], name: str, kind: type[Any], default: Any, before: str = ""
) -> Any:
    value = given.get(name)
    if value is None:
        return default
    if not isinstance(value, kind):
        where = before + name
        raise RequestError(f"{where} is {_kind(value)}; give {_KINDS[kind]}", param=where)
    return value


def _number(
    given: Mapping[str, Any],
    name: str,
    default: float,
    high: float,
    low: float = 0.0,
    *,
    param: str = "",
) -> float:
    value = given.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        where = f"{param} of {name}" if param else name
        raise RequestError(
            f"{where} {json.dumps(value)[:80]}; give a number from {low:g} to {high:g}",
            param=param or name,
        )
    return float(value)


def _integer(
    given: Mapping[str, Any], name: str, default: int | None, low: int, high: int = _MOST_INT
) -> int | None:
    value = given.get(name)
    if value is None:
        return default
    if type(value) is not int or not low <= value <= high:
        raise RequestError(
            f"{name} {json.dumps(value)[:80]}; give an integer from {low} to {high}", param=name
        )
    return value


def _refused(where: str) -> RequestError:
    return RequestError(
        f"{where} is not supported here; leave it out", param=where, code="unsupported_parameter"
    )


def _is_among(value: Any, allowed: tuple[Any, ...]) -> bool:
    """Whether a value is among those allowed. Unlike Python's `in`, it distinguishes False from
    0."""
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in allowed)


_KINDS = {dict: "an object", list: "a list", str: "text", bool: "true or false"}


def _kind(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return json.dumps(value)
    return _KINDS.get(type(value), "a number")
