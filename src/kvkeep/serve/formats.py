"""Formats: how a model marks reasoning and calls of tools in its answers.

A format is a `response_template` of transformers, which the tokenizer's parser follows. Tokenizers
that bring none get one by what their chat template mentions.
"""

from __future__ import annotations

import json
from typing import Any

_REASONING = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
_XML = {"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>"}
_NAMED = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
_JSON = {"content": "json", "content_args": {"allow_non_json": True}, "repeats": True}

_CALLS: dict[str, dict[str, Any]] = {
    "<function=": {  # Qwen3-Coder, Qwen3.5
        "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
        "close": "</tool_call>",
        "content": "xml-inline",
        "content_args": _XML,
        "repeats": True,
        "transform": _NAMED,
    },
    "<tool_call>": {  # Hermes, Qwen2.5, Qwen3
        "open_pattern": r"\s*<tool_call>",
        "close": "</tool_call>",
        **_JSON,
    },
    "[ARGS]": {  # Mistral, since Mistral Small 3.2
        "open_pattern": r"\s*\[TOOL_CALLS\](?P<name>[^\[\]{}]+)(?:\[CALL_ID\][^\[\]]*)?\[ARGS\]",
        "close_pattern": r"(?=\[TOOL_CALLS\])",
        "transform": _NAMED,
        **_JSON,
    },
    "[TOOL_CALLS]": {"open_pattern": r"\s*\[TOOL_CALLS\]", **_JSON},
    '"parameters"': {  # Llama: the whole answer is a call, or several with semicolons between
        "open_pattern": r"(?:\A\s*(?:<\|python_tag\|>\s*)?|(?<=\}\s*;\s*))(?=\{)",
        "close_pattern": r"(?<=\})\s*;\s*(?=\{)",
        **_JSON,
    },
}
"""How calls are written, by what the chat templates of such models mention; the first counts."""

_WRITTEN = {
    "<tool_call>": ("<tool_call>\n", "arguments", "\n</tool_call>"),
    "[ARGS]": ("[TOOL_CALLS]{name}[ARGS]", "", ""),
    "[TOOL_CALLS]": ("[TOOL_CALLS][", "arguments", "]"),
    '"parameters"': ("", "parameters", ""),
}
"""Text before and behind a call as JSON, and its name of the arguments; empty: the text before has
the function's name, and only the arguments are JSON."""


def forced_calls(
    template: str, tools: list[dict[Any, Any]]
) -> list[tuple[str, dict[str, Any], str]] | None:
    """A call of each tool, as text before, a JSON schema, and text behind; None: there is no
    schema of calls as models with this chat template write them."""
    mark = next((mark for mark in _CALLS if mark in template), "")
    if mark not in _WRITTEN:
        return None
    before, field, behind = _WRITTEN[mark]
    calls = []
    for tool in tools:
        name = tool["function"]["name"]
        schema = tool["function"].get("parameters") or {"type": "object"}
        if field:
            schema = {
                "type": "object",
                "properties": {"name": {"const": name}, field: schema},
                "required": ["name", field],
                "additionalProperties": False,
            }
        calls.append((before.replace("{name}", name), schema, behind))
    return calls


def reasoning_marks(template: str) -> tuple[str, str] | None:
    """What begins and ends reasoning in answers of models with this chat template, if they
    reason."""
    return next((marks for marks in _REASONING if marks[1] in template), None)


def response_template(template: str, tools: bool) -> dict[str, Any] | None:
    """The format of answers of models with this chat template; None: they are plain text.

    Args:
        tools: whether they may call tools.
    """
    fields: dict[str, Any] = {}
    marks = reasoning_marks(template)
    if marks is not None:
        fields["reasoning_content"] = {"open": marks[0], "close": marks[1]}
    calls = [calls for mark, calls in _CALLS.items() if mark in template]
    if tools and calls:
        fields["tool_calls"] = calls[0]
    if not fields:
        return None
    return {"start_anchor_pattern": r"\A", "fields": fields | {"content": {}}}


def shown_tokens(tokenizer: Any, response_template: dict[str, Any]) -> frozenset[int]:
    """The special tokens that a format mentions, which its parser must see."""
    mentioned = json.dumps(response_template).replace("\\", "")
    known = tokenizer.added_tokens_decoder.items()
    return frozenset(
        token for token, added in known if added.special and added.content in mentioned
    )
