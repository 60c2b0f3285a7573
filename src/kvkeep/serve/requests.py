"""Requests: the bodies that OpenAI's API defines, as pydantic models, and how one is refused."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Discriminator,
    Field,
    Strict,
    Tag,
    ValidationError,
    model_validator,
)

from kvkeep.errors import KVKeepError, SpecError
from kvkeep.generate.sampling import SamplingParams, bias, penalty

_MOST_INT = 2**63 - 1  # Python refuses to print integers of many digits
_LEAST_TEMPERATURE = 1e-4  # below it decoding is greedy: dividing logits by it would overflow
_NAMED_WHOLE = ("logit_bias", "prompt", "stop")  # errors name the field, not the item in it
_TAGS = ("(text)", "(list)")  # of a text or a list; pydantic puts them into the paths of errors


@dataclass(eq=False)
class RequestError(KVKeepError):
    """A refused request: the field and code at fault, and the HTTP status."""

    message: str
    _: KW_ONLY
    param: str | None = None
    code: str | None = None
    status: int = 400

    def __str__(self) -> str:
        return self.message

    @property
    def outcome(self) -> str:
        """How a request that ends with this error is counted."""
        if self.status in (429, 503):
            return "unavailable"
        return "refused" if self.status < 500 else "failed"

    def body(self) -> dict[str, Any]:
        """The error in the format of OpenAI's API."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = "rate_limit_error" if self.status == 429 else kind
        about = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": about}


# -- types of fields ---------------------------------------------------------------------------


class _UnsupportedError(ValueError):
    """A value that would change the answer, of a field that is not supported."""


def _only(*allowed: Any) -> AfterValidator:
    """Refuses all values but a few of this type: False is not 0."""

    def check(given: Any) -> Any:
        if (type(given), given) not in [(type(one), one) for one in allowed]:
            give = " or ".join(map(json.dumps, [*allowed, None]))
            raise _UnsupportedError(f"give {give}, all else is not supported")
        return given

    return AfterValidator(check)


def _tag(given: Any) -> str:
    return "(list)" if isinstance(given, list) else "(text)"


def _loaded(given: Any) -> Any:
    """The JSON value that a text holds; other values, and text of other kinds, as they are."""
    try:
        return json.loads(given) if isinstance(given, str) else given
    except (ValueError, RecursionError):
        return given


def _named(tool: dict[Any, Any]) -> dict[Any, Any]:
    function = tool.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError("give a function with a name")
    return tool


def _single(given: Any) -> Any:
    """The only prompt of a list, which may be text or token ids."""
    if isinstance(given, list) and given and isinstance(given[0], str | list):
        if len(given) > 1:
            raise ValueError("give one text, or the token ids of one")
        return given[0]
    return given


def _few(given: Any) -> Any:
    if isinstance(given, dict) and len(given) > 1024:
        raise ValueError("give at most 1024 tokens")
    return given


def _as_list(given: Any) -> Any:
    return [given] if isinstance(given, str) else given


Text = Annotated[str, Strict(), Field(min_length=0)]  # with a bound pydantic checks its Unicode
Flag = Annotated[bool, Strict()]
Integer = Annotated[int, Strict(), Field(ge=-_MOST_INT - 1, le=_MOST_INT)]
Count = Annotated[Integer, Field(ge=1)]
Number = Annotated[float, Strict()]
Penalty = Annotated[Number, Field(ge=-2, le=2)]
Stop = Annotated[Text, Field(min_length=1, max_length=1000)]  # new text is compared with each of it
TokenId = Annotated[Text, Field(pattern="^(0|[1-9][0-9]{0,9})$")]
Bias = Annotated[Number, Field(ge=-100, le=100)]
Tool = Annotated[dict[Any, Any], AfterValidator(_named)]
FirstError = Field(fail_fast=True)  # pydantic keeps each error, of which a large list has many


class _Object(BaseModel):
    """A JSON object. Unknown fields are ignored, and fields that are null are left out."""

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        if isinstance(given, dict):
            return {name: value for name, value in given.items() if value is not None}
        return given


class TextPart(_Object):
    """A part of a message. The models read text only."""

    type: Literal["text"]
    text: Text


class Function(_Object):
    """A function that a model called. `arguments` is an object, as chat templates expect it."""

    name: Text
    arguments: Annotated[dict[Any, Any], BeforeValidator(_loaded)] = {}


class ToolCall(_Object):
    """A call of a tool in an assistant's message."""

    id: Text | None = None
    function: Function


class Message(_Object):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[
        Annotated[Text, Tag("(text)")] | Annotated[list[TextPart], FirstError, Tag("(list)")],
        Discriminator(_tag),
    ]
    tool_calls: Annotated[list[ToolCall], FirstError] = []
    tool_call_id: Text | None = None
    name: Text | None = None
    audio: Annotated[Any, _only()] = None
    function_call: Annotated[Any, _only()] = None

    @model_validator(mode="before")
    @classmethod
    def _with_content(cls, given: Any) -> Any:
        """An assistant's message may be calls of tools alone."""
        if isinstance(given, dict) and given.get("role") == "assistant":
            return given | {"content": "" if given.get("content") is None else given["content"]}
        return given

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates expect it."""
        role, text = "system" if self.role == "developer" else self.role, self.content
        if isinstance(text, list):
            text = "".join(part.text for part in text)
        message: dict[str, Any] = {"role": role, "content": text}
        if role == "assistant" and self.tool_calls:
            message["tool_calls"] = [
                {"type": "function", "function": dict(call.function)}
                | ({} if call.id is None else {"id": call.id})
                for call in self.tool_calls
            ]
        if role == "tool":
            names = {"tool_call_id": self.tool_call_id, "name": self.name}
            message |= {key: name for key, name in names.items() if name is not None}
        return message


class StreamOptions(_Object):
    """What a stream has beside the text."""

    include_usage: Flag = False
    include_cache: Flag = False


# -- requests ------------------------------------------------------------------------------------


class GenerationRequest(_Object):
    """What the requests for chats and for plain completions have in common. `Sampling` checks
    top_p, top_k and min_p."""

    chat: ClassVar[bool]
    prompt_field: ClassVar[str]

    model: Text
    max_tokens: Count | None = None
    """Of each answer; None: as many as the context and the server permit."""
    temperature: Annotated[Number, Field(ge=0, le=2)] = 1.0
    top_p: Number = 1.0
    top_k: Integer = 0
    min_p: Number = 0.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    logit_bias: Annotated[dict[TokenId, Bias], BeforeValidator(_few)] = {}
    top_logprobs: int | None = None
    """How many of the likeliest tokens to name with each token; None: no logprobs."""
    stop: Annotated[list[Stop], Field(max_length=4), BeforeValidator(_as_list)] = []
    seed: Integer | None = None
    n: Annotated[Count, Field(le=128)] = 1
    stream: Flag = False
    stream_options: StreamOptions = StreamOptions()

    @model_validator(mode="after")
    def _check_include_cache(self) -> Self:
        if self.stream_options.include_cache and (self.n > 1 or not self.stream):
            raise RequestError(
                "stream_options.include_cache shows the cache of one answer while it is streamed; "
                "give stream true and n 1, or leave it out",
                param="stream_options.include_cache",
            )
        return self

    def without_prompt(self) -> Self:
        """A copy without the prompt, which may be large and is not needed once it is tokenised."""
        return self.model_copy(update={self.prompt_field: [], "tools": []})

    def params(self, prompt_tokens: int, max_new_tokens: int) -> SamplingParams:
        """How the answers are generated.

        Raises:
            RequestError: an option of sampling is out of its range.
        """
        processors = []
        presence, frequency = self.presence_penalty, self.frequency_penalty
        if presence or frequency:
            processors.append(penalty(prompt_tokens, presence=presence, frequency=frequency))
        if self.logit_bias:
            processors.append(bias({int(token): added for token, added in self.logit_bias.items()}))
        temperature = self.temperature if self.temperature >= _LEAST_TEMPERATURE else 0.0
        try:
            return SamplingParams(
                max_new_tokens=max_new_tokens,
                temperature=temperature,
                top_k=self.top_k,
                top_p=self.top_p,
                min_p=self.min_p,
                seed=self.seed,
                processors=processors,
                stop=self.stop,
                logprobs=self.top_logprobs is not None,
                top_logprobs=self.top_logprobs or 0,
            )
        except SpecError as error:  # its message begins with the option's name
            raise RequestError(str(error), param=str(error).partition(" ")[0]) from None


class ChatCompletionRequest(GenerationRequest):
    """The body of a request to /v1/chat/completions."""

    chat, prompt_field = True, "messages"

    messages: Annotated[list[Message], Field(min_length=1), FirstError]
    tools: Annotated[list[Tool], FirstError] = []
    tool_choice: Annotated[Any, _only("auto", "none")] = "auto"
    max_completion_tokens: Count | None = None
    logprobs: Flag = False
    top_logprobs: Annotated[Integer, Field(ge=0, le=20)] | None = None
    response_format: Annotated[Any, _only({"type": "text"})] = None
    modalities: Annotated[Any, _only(["text"])] = None
    audio: Annotated[Any, _only()] = None
    prediction: Annotated[Any, _only()] = None
    web_search_options: Annotated[Any, _only()] = None
    functions: Annotated[Any, _only([])] = None
    function_call: Annotated[Any, _only("none")] = None

    @model_validator(mode="after")
    def _join_options(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise RequestError(
                f"top_logprobs {self.top_logprobs} without logprobs; give logprobs true too",
                param="top_logprobs",
            )
        self.top_logprobs = (self.top_logprobs or 0) if self.logprobs else None
        self.max_tokens = self.max_completion_tokens or self.max_tokens
        return self


class CompletionRequest(GenerationRequest):
    """The body of a request to /v1/completions. `prompt` is text, or the token ids of one text."""

    chat, prompt_field = False, "prompt"

    prompt: Annotated[
        Annotated[Text, Field(min_length=1), Tag("(text)")]
        | Annotated[list[Annotated[int, Strict()]], Field(min_length=1), FirstError, Tag("(list)")],
        Discriminator(_tag),
        BeforeValidator(_single),
    ]
    max_tokens: Count | None = 16
    top_logprobs: Annotated[Integer, Field(ge=0, le=5)] | None = Field(None, alias="logprobs")
    echo: Annotated[Any, _only(False)] = None
    best_of: Annotated[Any, _only(1)] = None
    suffix: Annotated[Any, _only("")] = None


Request = ChatCompletionRequest | CompletionRequest
_Request = TypeVar("_Request", bound=GenerationRequest)


def read(body: bytes | bytearray, kind: type[_Request]) -> _Request:
    """Parse the body of a request.

    Raises:
        RequestError: the body is not JSON, or a field is wrong or unsupported.
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
    """Refuse a repeated name, for which other programs may use the other value."""
    given = dict(pairs)
    if len(given) < len(pairs):
        twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"an object has the name {json.dumps(twice)[:80]} twice")
    return given


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a valid number")


def _refused(problem: Mapping[str, Any]) -> RequestError:
    """The refusal for an error of pydantic: it names the field, its value and what to give."""
    path = [part for part in problem["loc"] if part not in (*_TAGS, "[key]")]
    where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)[1:81]
    param = path[0] if path and path[0] in _NAMED_WHOLE else where
    if problem["type"] == "missing":
        message, code = f"{where} is missing; give it", "missing_required_parameter"
        return RequestError(message, param=str(param), code=code)
    error = problem.get("ctx", {}).get("error")  # what a validator here raised
    wanted = str(error or problem["msg"][0].lower() + problem["msg"][1:])
    return RequestError(
        f"{where or 'the JSON body'} is {_shown(problem['input'])}: {wanted}",
        param=str(param) or None,
        code="unsupported_parameter" if isinstance(error, _UnsupportedError) else None,
    )


def _shown(value: Any) -> str:
    """A value in a message. Lists and objects may be too deep to be written."""
    if isinstance(value, list | dict):
        return "an object" if isinstance(value, dict) else f"a list of length {len(value)}"
    return json.dumps(value)[:80]
