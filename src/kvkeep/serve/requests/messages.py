"""Messages: a conversation as clients send it and as chat templates read it."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Discriminator, Tag, model_validator
from pydantic_core import from_json

from kvkeep.serve.requests.fields import NO_MEDIA, Exact, FirstError, Lenient, Text, only, tag


def _object(given: Any) -> Any:
    """Parse a call's arguments, which may be incomplete, to the object that chat templates expect.
    Text that is not JSON stays text."""
    if not isinstance(given, str):
        return given
    try:
        found = from_json(given or "{}", allow_inf_nan=False, allow_partial="trailing-strings")
    except ValueError:
        return given
    return found if isinstance(found, dict) else given


IMAGE = secrets.token_hex(16)
"""Placeholder for an image in a message's text. Clients do not know it."""


class ImageURL(Lenient):
    """An image: a data URL, or a URL to fetch."""

    url: Text
    detail: Any = None


class Part(Exact):
    """A part of a message. `cache_control` and `annotations` do not affect the prompt."""

    type: Annotated[Literal["text", "image_url"], NO_MEDIA]
    text: Text | None = None
    image_url: ImageURL | None = None
    cache_control: Any = None
    annotations: Any = None

    @model_validator(mode="after")
    def _check_needed(self) -> Self:
        contents = {"text": self.text, "image_url": self.image_url}
        if [name for name, x in contents.items() if x is not None] != [self.type]:
            raise ValueError(f"give {self.type}, and nothing else")
        return self


class Function(Lenient):
    """A function that a model called."""

    name: Text = ""
    arguments: Annotated[dict[Any, Any] | Text, BeforeValidator(_object)] = {}


class ToolCall(Lenient):
    """A tool call in an assistant's message."""

    id: Text | None = None
    function: Function


class Message(Lenient):
    """A message of a conversation. Only fields that affect the prompt are checked, because clients
    send back answers of any server."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[
        Annotated[Text, Tag("(text)")] | Annotated[list[Part], FirstError, Tag("(list)")],
        Discriminator(tag),
    ]
    reasoning_content: Text | None = None
    tool_calls: Annotated[list[ToolCall], FirstError] = []
    tool_call_id: Text | None = None
    name: Text | None = None
    audio: Annotated[Any, only()] = None
    images: Annotated[Any, only([])] = None

    @model_validator(mode="before")
    @classmethod
    def _in_todays_form(cls, given: Any) -> Any:
        """Convert deprecated functions to tools, and null content of assistant or tool to text."""
        if not isinstance(given, dict):
            return given
        given = dict(given)
        if given.get("role") == "function":
            given["role"] = "tool"
        call = given.pop("function_call", None)
        if call is not None and not given.get("tool_calls"):
            given["tool_calls"] = [{"function": call}]
        if given.get("role") in ("assistant", "tool") and given.get("content") is None:
            given["content"] = given.get("refusal") or ""
        given.setdefault("reasoning_content", given.get("reasoning"))
        return given

    @property
    def text(self) -> str:
        """The content as one text, with `IMAGE` for each image."""
        if isinstance(self.content, str):
            return self.content
        return "".join(IMAGE if part.text is None else part.text for part in self.content)

    @property
    def pictures(self) -> list[ImageURL]:
        """The images, in order."""
        parts = [] if isinstance(self.content, str) else self.content
        return [part.image_url for part in parts if part.image_url is not None]

    @model_validator(mode="after")
    def _check_images(self) -> Self:
        if self.pictures and self.role != "user":
            raise ValueError(f"a message of {self.role} has an image; only the user's may")
        return self


def for_template(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as chat templates expect them. Calls without an id, and their results, get one; each
    result gets the name of the called function."""
    made: list[dict[str, Any]] = []
    names: dict[str, str] = {}
    unanswered: list[str] = []
    for message in messages:
        one: dict[str, Any] = {"role": message.role, "content": message.text}
        if message.role == "assistant":
            if message.reasoning_content:
                one["reasoning_content"] = message.reasoning_content
            calls = message.tool_calls
            ids = [call.id or f"call{len(names) + at:05}" for at, call in enumerate(calls)]
            unanswered = list(ids)
            names |= {key: call.function.name for key, call in zip(ids, calls, strict=True)}
            if calls:
                one["tool_calls"] = [
                    {"type": "function", "id": key, "function": call.function.model_dump()}
                    for key, call in zip(ids, calls, strict=True)
                ]
        elif message.role == "tool":
            key = message.tool_call_id or next(iter(unanswered), "")
            unanswered = [other for other in unanswered if other != key]
            about = {"tool_call_id": key, "name": message.name or names.get(key, "")}
            one |= {field: value for field, value in about.items() if value}
        made.append(one)
    return made


HERMES = "<tool_call>"
"""The mark that starts a call in Hermes' format."""

_OFFER = """You can call these functions:
{tools}
To call one, write its name and its arguments as JSON:
<tool_call>
{{"name": "...", "arguments": {{...}}}}
</tool_call>"""


def in_hermes_form(
    messages: Sequence[dict[str, Any]], tools: Sequence[dict[Any, Any]]
) -> list[dict[str, Any]]:
    """Write tools and calls into the messages' text in Hermes' format, for chat templates that do
    not render them."""
    offer = _OFFER.format(tools="\n".join(json.dumps(tool["function"]) for tool in tools))
    made = [{"role": "system", "content": offer}] if tools else []
    results = False  # whether the last message has results of calls
    for message in messages:
        text, of_call = message["content"], message["role"] == "tool"
        for call in message.get("tool_calls", ()):
            text += f"\n<tool_call>\n{json.dumps(call['function'])}\n</tool_call>"
        role = message["role"]
        if of_call:
            role, text = "user", f"<tool_response>\n{text}\n</tool_response>"
        if made and ((results and role == "user") or role == made[-1]["role"] == "system"):
            text = f"{made.pop()['content']}\n\n{text}"
        made.append({"role": role, "content": text.lstrip() if role == "assistant" else text})
        results = of_call
    return made
