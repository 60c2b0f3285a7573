"""Parts: an answer's text divided into content, reasoning and tool calls."""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Collection
from typing import Any, NamedTuple, final

CONTENT, REASONING = "content", "reasoning_content"
_REASONING_FIELDS = (REASONING, "reasoning", "thinking")
_CALLS = "tool_calls"
_ALPHANUMERIC = string.ascii_letters + string.digits


class Said(NamedTuple):
    """A piece of the text of a part."""

    part: str
    text: str


class Call(NamedTuple):
    """A tool call: its index in the answer, id, tool name, and arguments as JSON."""

    number: int
    id: str
    name: str
    arguments: str


@final
class Parts:
    """Divides an answer's text into parts while it is generated.

    Args:
        parser: the tokenizer's parser for this answer; None: all text is content.
        tools: names of the tools that may be called. A call of any other tool is content.
        most_calls: most calls; further calls are dropped; None: no limit.
        closed: whether a call counts only with its end mark; otherwise a complete JSON value ends
            it.
    """

    def __init__(
        self,
        parser: Any = None,
        tools: Collection[str] = (),
        *,
        most_calls: int | None = None,
        closed: bool = False,
    ) -> None:
        self._parser, self._tools, self._most_calls = parser, tools, most_calls
        self._closed = closed
        self.calls = 0
        self._call = ""  # text of the current call so far
        self.part, self._begun, self._held = "", False, ""

    def push(self, text: str, *, last: bool) -> list[Said | Call]:
        """Add the next piece of text.

        Args:
            last: whether the answer's text is complete.
        """
        parser, found = self._parser, list[Said | Call]()
        if parser is None:
            return self._say(CONTENT, text)
        try:
            for event in parser.feed(text):
                found += self._take(event)
            for event in parser.finalize()[1] if last else ():
                found += self._take(event, written=not self._closed)
        except (LookupError, ValueError):  # text that cannot be parsed is content
            self._parser, text = None, self._call + text
            found += self._say(CONTENT, text)
        return found

    def _take(self, event: dict[str, Any], *, written: bool = True) -> list[Said | Call]:
        kind, field = event["type"], event["field"]
        if field == _CALLS:
            if kind == "region_chunk":
                self._call += event["text"]
            if kind != "region_close":
                return []
            text, self._call = self._call, ""
            return self._called(event["value"] if written else None, text)
        if kind != "region_chunk":
            return []
        return self._say(REASONING if field in _REASONING_FIELDS else CONTENT, event["text"])

    def _called(self, value: Any, written: str) -> list[Said | Call]:
        calls = [_function(one) for one in (value if isinstance(value, list) else [value])]
        if not all(calls) or any(call[0] not in self._tools for call in calls if call):
            return self._say(CONTENT, written)
        self.part = _CALLS
        found: list[Said | Call] = []
        for name, arguments in filter(None, calls):
            if self._most_calls is None or self.calls < self._most_calls:
                found.append(Call(self.calls, new_id(), name, arguments))
                self.calls += 1
        return found

    def _say(self, part: str, text: str) -> list[Said | Call]:
        """Add text of a part; white space around reasoning and between parts is removed."""
        if part != self.part:
            first = part == CONTENT and not self.part
            self.part, self._begun, self._held = part, first, ""
        text = self._held + text
        text, self._held = text if self._begun else text.lstrip(), ""
        if part == REASONING:
            kept = text.rstrip()
            text, self._held = kept, text[len(kept) :]
        self._begun |= bool(text)
        return [Said(part, text)] if text else []


def new_id() -> str:
    """A call id that all chat templates accept: Mistral's require nine characters."""
    return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))


def _function(call: Any) -> tuple[str, str] | None:
    """The name and the arguments of a call in any of the formats."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        return None
    arguments = function.get("arguments", function.get("parameters")) or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            return None
    return function["name"], json.dumps(arguments, ensure_ascii=False)
