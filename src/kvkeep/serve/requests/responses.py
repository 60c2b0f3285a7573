"""Requests to /v1/responses, translated to chats."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Discriminator, Field, Tag
from pydantic import model_validator as validator

from kvkeep.serve.requests.completions import (
    AnswerFields,
    ChatCompletionRequest,
    Padding,
    SampledRequest,
)
from kvkeep.serve.requests.fields import (
    NO_MEDIA,
    Count,
    Exact,
    FirstError,
    Flag,
    Ignored,
    Integer,
    Lenient,
    Refused,
    Text,
    object_tag,
    only,
    tag,
)

_LOGPROBS = "message.output_text.logprobs"
_NEEDED = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name"),
    "function_call_output": ("call_id", "output"),
    "reasoning": (),
}
"""Required fields of each item type."""


_TOLD = {"model", "instructions", "metadata", "temperature", "top_p", "max_output_tokens", "tools"}
_TOLD |= {"tool_choice", "parallel_tool_calls", "previous_response_id"}
"""Fields of a request that its response repeats."""


class Part(Lenient):
    """A part of a message, of a tool's result, or of reasoning."""

    type: Annotated[
        Literal[
            "input_text", "input_image", "output_text", "refusal", "reasoning_text", "summary_text"
        ],
        NO_MEDIA,
    ]
    text: Text = ""
    refusal: Text = ""
    image_url: Text | None = None
    file_id: Annotated[Any, only()] = None

    def for_chat(self) -> dict[str, Any]:
        """The part as a part of a chat message."""
        if self.type == "input_image":
            return {"type": "image_url", "image_url": {"url": self.image_url}}
        return {"type": "text", "text": self.text or self.refusal}

    @validator(mode="after")
    def _check_image(self) -> Self:
        if (self.type == "input_image") != (self.image_url is not None):
            raise ValueError("give image_url with type input_image, and with no other type")
        return self


_Content = Annotated[
    Annotated[Text, Tag("(text)")] | Annotated[list[Part], FirstError, Tag("(list)")],
    Discriminator(tag),
]


class Item(Lenient):
    """A message, a function call, its result, or reasoning. Only fields that affect the prompt are
    checked, because clients send back items of any server."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: _Content | None = None
    call_id: Text | None = None
    name: Text | None = None
    arguments: Text = ""
    output: _Content | None = None

    @validator(mode="after")
    def _check_needed(self) -> Self:
        for field in _NEEDED[self.type]:
            if getattr(self, field) is None:
                raise ValueError(f"give {field}, which type {self.type} requires")
        return self


class FunctionTool(Lenient):
    """A function that the model may call."""

    type: Literal["function"]
    name: Text
    description: Text | None = None
    parameters: dict[Any, Any] | None = None
    strict: Flag | None = None

    def for_chat(self) -> dict[str, Any]:
        """The function as a chat's tool."""
        function = self.model_dump(include={"name", "description", "parameters"}, exclude_none=True)
        return {"type": "function", "function": function}


class ChosenFunction(Exact):
    """The choice of one function."""

    type: Literal["function"]
    name: Text


class Format(Exact):
    """The format of answers."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: Text | None = None
    description: Text | None = None
    given: Annotated[dict[Any, Any] | None, Field(alias="schema")] = None
    strict: Flag | None = None

    def for_chat(self) -> dict[str, Any]:
        """The format as a chat's `response_format`."""
        about = self.model_dump(by_alias=True, exclude={"type"}, exclude_none=True)
        return {"type": self.type} | ({"json_schema": about} if about else {})


class TextOptions(Exact):
    """Options for the text of answers."""

    format: Format = Format()
    verbosity: Annotated[Any, only("medium")] = None


class Reasoning(Exact):
    """Options for reasoning."""

    effort: Text | None = None
    summary: Any = None
    generate_summary: Any = None


def _as_item(given: Any) -> Any:
    """A text as a user message."""
    return [{"role": "user", "content": given}] if isinstance(given, str) else given


class ResponsesRequest(SampledRequest, AnswerFields):
    """The body of a request to /v1/responses."""

    names: ClassVar[dict[str, str]] = {
        "messages": "input",
        "max_tokens": "max_output_tokens",
        "response_format": "text.format",
        "reasoning_effort": "reasoning",
        "logprobs": "include",
    }
    """Names of the chat's fields in this request."""

    input: Annotated[list[Item], Field(min_length=1), FirstError, BeforeValidator(_as_item)]
    """A text, or items: messages of user, assistant, system and developer, function calls and their
    results, and reasoning. Content is text, and for the user also [images](#images); references to
    items of earlier responses are refused."""
    instructions: Text | None = None
    """A system message before the input."""
    max_output_tokens: Count | None = None
    """Most tokens of an answer, reasoning included; see `max_tokens` of chats."""
    tools: Annotated[list[FunctionTool], FirstError] = []
    """Functions; the server has no built-in tools."""
    tool_choice: Annotated[
        Annotated[Literal["auto", "none", "required"], Tag("(text)")]
        | Annotated[ChosenFunction, Tag("(object)")],
        Discriminator(object_tag),
    ] = "auto"
    """`auto`, `none`, `required`, or a function by name; see [tools](#tools)."""
    text: TextOptions = TextOptions()
    """`format`: `text`, `json_object`, or `json_schema` with a schema; see
    [structured output](#structured-output)."""
    reasoning: Reasoning = Reasoning()
    """`effort`, as `reasoning_effort` of chats. The response contains the reasoning itself as
    items, no summaries."""
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] = []
    """`message.output_text.logprobs`. `reasoning.encrypted_content` is ignored: reasoning is
    readable and can be sent back."""
    top_logprobs: Annotated[Integer, Field(ge=0, le=20)] | None = None
    """With logprobs in `include`: number of likeliest tokens returned for each position."""
    stream_options: Padding = Padding()
    """`include_obfuscation`, only false."""
    store: Flag | None = None
    """Whether to keep the response so that it can be retrieved and continued. Needs `--responses`,
    which makes it the default."""
    previous_response_id: Text | None = None
    """Id of a kept response; its input and output items precede `input`; see
    [responses](#responses)."""
    conversation: Annotated[Any, only()] = None
    """Refused; use `previous_response_id`, or put all items into `input`."""
    background: Annotated[Any, only(False)] = None
    """Only false."""
    truncation: Annotated[Any, only("disabled")] = None
    """Only `disabled`: an input longer than the context is refused."""
    prompt: Refused = None
    context_management: Annotated[Any, only([])] = None
    """Refused."""
    image: Refused = None
    access_programs: Refused = None
    background_options: Ignored = None
    metadata: dict[Any, Any] = {}
    """Ignored; the response repeats it."""
    max_tool_calls: Any = None
    """Ignored: it limits calls of built-in tools, which this server lacks."""

    def chat(self) -> ChatCompletionRequest:
        """The request as a chat.

        Raises:
            RequestError: fields exclude each other; the error has the chat's field names.
        """
        shared = self.model_fields_set & SampledRequest.model_fields.keys()
        given: dict[str, Any] = {name: getattr(self, name) for name in shared}
        choice: Any = self.tool_choice
        if isinstance(choice, ChosenFunction):
            choice = {"type": "function", "function": {"name": choice.name}}
        return ChatCompletionRequest.model_validate(
            given
            | {
                "messages": self._messages(),
                "max_tokens": self.max_output_tokens,
                "tools": [tool.for_chat() for tool in self.tools],
                "tool_choice": choice,
                "parallel_tool_calls": self.parallel_tool_calls,
                "response_format": self.text.format.for_chat(),
                "reasoning_effort": self.reasoning.effort,
                "logprobs": _LOGPROBS in self.include,
                "top_logprobs": self.top_logprobs,
            }
        )

    def _messages(self) -> list[dict[str, Any]]:
        """The input as messages; reasoning, text and calls of one answer form one message."""
        made: list[dict[str, Any]] = []
        added: dict[str, Any]
        if self.instructions:
            made.append({"role": "system", "content": self.instructions})
        answer: dict[str, Any] = {}  # the assistant message under construction
        for item in self.input:
            content = _for_chat(item.content)
            if item.type == "function_call":
                own = {"reasoning_content", "content", "tool_calls"}
                function = {"name": item.name, "arguments": item.arguments}
                added = {"tool_calls": [{"id": item.call_id, "function": function}]}
            elif item.type == "reasoning":
                own, added = {"reasoning_content"}, {"reasoning_content": _text(item.content)}
            elif item.role == "assistant":
                own, added = {"reasoning_content"}, {"content": content}
            else:
                about = {"role": item.role, "content": content}
                if item.type == "function_call_output":
                    about = {"role": "tool", "tool_call_id": item.call_id}
                    about["content"] = _for_chat(item.output)
                made.append(about)
                answer = {}
                continue
            if not answer or answer.keys() - own - {"role"}:
                answer = {"role": "assistant"}
                made.append(answer)
            for field, value in added.items():
                answer[field] = answer[field] + value if field in answer else value
        return made

    def about(self) -> dict[str, Any]:
        """The response's fields that repeat the request, as OpenAI's API defines them."""
        form = self.text.format.model_dump(by_alias=True, exclude_none=True)
        return self.model_dump(include=_TOLD, warnings=False) | {
            "text": {"format": form},
            "reasoning": {"effort": self.reasoning.effort, "summary": None},
            "top_logprobs": self.top_logprobs or 0,
            "truncation": "disabled",
            "background": False,
        }


def _for_chat(content: str | list[Part] | None) -> Any:
    return [part.for_chat() for part in content] if isinstance(content, list) else content


def _text(content: str | list[Part] | None) -> str:
    return "".join(part.text for part in content) if isinstance(content, list) else content or ""
