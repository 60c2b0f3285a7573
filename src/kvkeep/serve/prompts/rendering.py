"""Rendering: a conversation as text by the model's chat template."""

from __future__ import annotations

import inspect
import json
import re
from itertools import accumulate
from typing import Any, NamedTuple, final

from kvkeep.errors import reason_of
from kvkeep.serve.prompts.formats import reasoning_marks
from kvkeep.serve.refused import RequestError
from kvkeep.serve.requests.completions import Conversation, NamedTool
from kvkeep.serve.requests.messages import HERMES, IMAGE, for_template, in_hermes_form

_WORD = re.compile(r"\w+")


class Rendered(NamedTuple):
    """A rendered prompt.

    Attributes:
        begun: the start of the answer that the prompt contains.
        tools: tools that may be called.
        template: the chat template, which determines the answer format; `HERMES` is added if tools
            are written in that form.
    """

    text: str
    begun: str
    tools: list[dict[Any, Any]]
    template: str


@final
class Rendering:
    """Renders conversations.

    Args:
        name: the model's name for clients.
        most_bytes: most bytes of a conversation and of its rendered text.
        sees: whether the template takes content as a list of text and image parts.
    """

    def __init__(self, tokenizer: Any, name: str, most_bytes: int, *, sees: bool = False) -> None:
        self._tokenizer, self._name, self._most_bytes = tokenizer, name, most_bytes
        self._sees = sees

    def render(self, request: Conversation) -> Rendered:
        """Render a conversation.

        Raises:
            RequestError: the template refuses the conversation or ignores a part of it, there is no
                template, or the text is too long.
        """
        if self._tokenizer.chat_template is None:
            why = f"{self._name} has no chat template; use /v1/completions"
            raise RequestError(why, "messages", "no_chat_template")
        if request.images and not self._sees:
            why = f"{self._name} reads text only here; leave out images"
            raise RequestError(why, "messages", "unsupported_parameter")
        messages, tools = for_template(request.messages), _tools(request)
        template = self._tokenizer.get_chat_template(tools=tools or None)
        calls = any("tool_calls" in message for message in messages)
        if "tools" not in template and (tools or calls):
            messages, template = in_hermes_form(messages, tools), HERMES + template
        elif calls and "tool_calls" not in template:  # the template would ignore the calls
            why = f"the chat template of {self._name} does not render tool_calls"
            raise RequestError(why, "tool_calls")
        if "developer" not in template:
            for message in messages:
                message["role"] = message["role"].replace("developer", "system")
        options = self._variables(request, template)
        continues = request.continue_final_message
        begins = not continues and request.add_generation_prompt is not False
        options |= {"tools": tools or None, "continue_final_message": continues}
        try:
            if _is_larger([messages, options], self._most_bytes):
                raise self.too_large("messages")
            messages, text = self._with_system(messages, add_generation_prompt=begins, **options)
            text.encode()
            begun = ""
            if continues:
                begun = str(messages[-1]["content"])
            elif begins and reasoning_marks(template) is not None:
                without = self._text(messages, add_generation_prompt=False, **options)
                begun = text.removeprefix(without) if text.startswith(without) else ""
            return Rendered(text, begun, tools, template)
        except RequestError:
            raise
        except Exception as error:  # templates are programs that raise errors of all classes
            reason = reason_of(error)
            why = f"the chat template of {self._name} cannot render these messages: {reason}"
            raise RequestError(why, "messages") from error

    def too_large(self, field: str) -> RequestError:
        """The error for a prompt with too much text."""
        most = f"{self._most_bytes} bytes, the most that this server reads"
        message = f"{field} exceeds the maximum context length: more than {most}; shorten it"
        return RequestError(message, field, "context_length_exceeded")

    def _variables(self, request: Conversation, template: str) -> dict[str, Any]:
        """The template variables that a request sets.

        Raises:
            RequestError: the template does not read a variable, or clients may not set it.
        """
        given, read = dict(request.chat_template_kwargs), set(_WORD.findall(template))
        own = inspect.signature(self._tokenizer.apply_chat_template).parameters
        whose = f"the chat template of {self._name}"
        for name in given:
            if name in own or name not in read:
                message = (
                    f"chat_template_kwargs.{name[:80]} is no variable of {whose}; leave it out"
                )
                raise RequestError(message, "chat_template_kwargs")
        effort = request.reasoning_effort
        if effort is None:
            return given
        if "reasoning_effort" in read:
            return {"reasoning_effort": effort} | given
        if "enable_thinking" in read:
            return {"enable_thinking": effort != "none"} | given
        raise RequestError.of("reasoning_effort", f"is not read by {whose}; leave it out")

    def _with_system(
        self, messages: list[dict[str, Any]], **options: Any
    ) -> tuple[list[dict[str, Any]], str]:
        """Render messages; return the messages as rendered, and the text. If the template refuses
        or ignores system messages, their text is put before the next user message."""
        system = [one["content"].strip() for one in messages if one["role"] == "system"]
        error = None
        try:
            text = self._text(messages, **options)
            if all(one in text for one in system):
                return messages, text
        except Exception as raised:
            if not system:
                raise
            error = raised
        folded = _folded(messages)
        if folded is None:
            if error is not None:
                raise error
            raise ValueError("it leaves out system messages, and no user message follows them")
        return folded, self._text(folded, **options)

    def _text(self, messages: list[dict[str, Any]], **options: Any) -> str:
        if self._sees:
            messages = [one | {"content": _parts(one["content"])} for one in messages]
        text: str = self._tokenizer.apply_chat_template(messages, tokenize=False, **options)
        return text


def _parts(content: str) -> list[dict[str, str]]:
    """A message's content as templates of vision-language models expect it."""
    first, *others = ({"type": "text", "text": text} for text in content.split(IMAGE))
    parts = [first]
    for text in others:
        parts += [{"type": "image"}, text]
    return [part for part in parts if part.get("text") != ""] or parts


def _tools(request: Conversation) -> list[dict[Any, Any]]:
    """The tools that may be called.

    Raises:
        RequestError: `tool_choice` requires a tool that `tools` lacks.
    """
    choice = request.tool_choice
    if choice == "none":
        return []
    if choice == "auto":
        return request.tools
    tools = request.tools
    if isinstance(choice, NamedTool):
        tools = [one for one in tools if one["function"]["name"] == choice.function.name]
    if not tools:
        raise RequestError.of("tool_choice", "asks for a tool that is not in tools; add it")
    return tools


def _folded(messages: list[dict[str, Any]]) -> list[dict[str, Any]] | None:
    """Move the text of system messages to the start of the next user message; None if no user
    message follows."""
    made, before = [], list[str]()
    for message in messages:
        if message["role"] == "system":
            before.append(message["content"])
            continue
        if message["role"] == "user" and before:
            message = message | {"content": "\n\n".join([*before, message["content"]])}
            before = []
        made.append(message)
    return None if before else made


def _is_larger(given: Any, limit: int) -> bool:
    """Whether a template that writes its input as indented JSON would exceed `limit` bytes.
    Indentation makes deeply nested input long, so its size is counted without building the text."""
    pieces = json.JSONEncoder(indent=4, ensure_ascii=False).iterencode(given)
    return any(total > limit for total in accumulate(len(piece.encode()) for piece in pieces))
