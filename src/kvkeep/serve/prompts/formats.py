"""Formats: how a model marks reasoning and tool calls in its answers.

A format is a `response_template` of transformers, which the tokenizer's parser follows. For a
tokenizer without one, the text of its chat template decides the format.
"""

from __future__ import annotations

import json
from typing import Any

from kvkeep.serve.refused import RequestError
from kvkeep.serve.requests.structures import OneOf, Perhaps, Piece, Until

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
    '"parameters"': {  # Llama: the whole answer is calls, separated by semicolons
        "open_pattern": r"(?:\A\s*(?:<\|python_tag\|>\s*)?|(?<=\}\s*;\s*))(?=\{)",
        "close_pattern": r"(?<=\})\s*;\s*(?=\{)",
        **_JSON,
    },
}
"""The call format by a string that the model's chat template contains; the first match counts."""

_WRITTEN = {
    "<tool_call>": ('<tool_call>\n{"name": NAME, "arguments": ', "}\n</tool_call>"),
    "[ARGS]": ("[TOOL_CALLS]NAME[ARGS]", ""),
    "[TOOL_CALLS]": ('[TOOL_CALLS][{"name": NAME, "arguments": ', "}]"),
    '"parameters"': ('{"name": NAME, "parameters": ', "}"),
}
"""Text before and after the arguments of a call, which are JSON."""


def forced_calls(template: str, tools: list[dict[Any, Any]]) -> list[list[Piece]] | None:
    """A call of each tool, as a sequence of text pieces; None if the call format of the chat
    template is unknown.

    Raises:
        RequestError: this format cannot express a parameter of a tool.
    """
    mark = next((mark for mark in _CALLS if mark in template), "")
    functions = [tool["function"] for tool in tools]
    if mark == "<function=":
        return [_xml(function["name"], function.get("parameters")) for function in functions]
    if mark not in _WRITTEN:
        return None
    before, behind = _WRITTEN[mark]
    calls: list[list[Piece]] = []
    for function in functions:
        name = function["name"] if mark == "[ARGS]" else json.dumps(function["name"])
        schema = function.get("parameters") or {}
        if isinstance(schema, dict):
            closed = {"additionalProperties": False} if "properties" in schema else {}
            schema = {"type": "object"} | closed | schema  # some models fill open ones forever
        calls.append([before.replace("NAME", name), schema, behind])
    return calls


def _xml(name: str, given: Any) -> list[Piece]:
    """A call with an XML element for each parameter, in the schema's order."""
    schema = given if isinstance(given, dict) else {}
    parameters, needed = schema.get("properties"), schema.get("required")
    pieces: list[Piece] = [f"<tool_call>\n<function={name}>\n"]
    common = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    for parameter, own in parameters.items() if isinstance(parameters, dict) else ():
        value = _xml_value(own, common, f"{name}.{parameter}")
        element = [f"<parameter={parameter}>\n", *value]
        always = isinstance(needed, list) and parameter in needed
        pieces += element if always else [Perhaps(element)]
    return [*pieces, "</function>\n</tool_call>"]


def _xml_value(given: Any, common: dict[str, Any], name: str) -> list[Piece]:
    """A value and the end of its element. The parser reads a string as text and other types as
    JSON, so a parameter that allows both would be ambiguous."""
    schema, end = given if isinstance(given, dict) else {}, "\n</parameter>\n"
    kind, choices = schema.get("type"), schema.get("enum")
    if "const" in schema:
        choices = [schema["const"]]
    if choices and isinstance(choices, list) and all(isinstance(one, str) for one in choices):
        return [OneOf(choices), end]
    kinds = {*kind} if isinstance(kind, list) else {kind}
    if kinds <= {"integer", "number", "boolean", "null", "object", "array"}:
        return [schema | common, end]
    if kinds == {"string"} and not {"pattern", "format", "enum", "const"} & schema.keys():
        return [Until(end, schema.get("minLength", 0), schema.get("maxLength"))]
    message = f"{name[:80]} needs one type, and text no pattern, for tool_choice with this model"
    raise RequestError(f"{message}; change it, or leave out tool_choice", "tools")


def reasoning_marks(template: str) -> tuple[str, str] | None:
    """The start and end marks of reasoning in this chat template; None without reasoning."""
    return next((marks for marks in _REASONING if marks[1] in template), None)


def response_template(template: str, tools: bool) -> dict[str, Any] | None:
    """The answer format of models with this chat template; None for plain text.

    Args:
        tools: whether answers may call tools.
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
    """The special tokens in a format, which the decoded text must keep for the parser."""
    mentioned = json.dumps(response_template).replace("\\", "")
    known = tokenizer.added_tokens_decoder.items()
    return frozenset(
        token for token, added in known if added.special and added.content in mentioned
    )
