"""The table of docs/serve.md, of the fields that requests have. To write it again:

PYTHONPATH=tests python -m support.field_table
"""

from __future__ import annotations

import json
from pathlib import Path

from kvkeep.serve.requests.completions import ChatCompletionRequest, CompletionRequest
from kvkeep.serve.requests.responses import ResponsesRequest

PAGE = Path(__file__).parents[2] / "docs" / "serve.md"
BEGIN, END = "<!-- fields -->\n", "<!-- end of fields -->\n"
KINDS = {
    "chat": ChatCompletionRequest,
    "completions": CompletionRequest,
    "responses": ResponsesRequest,
}


def fields(kind):
    """The names of a request's fields, as clients send them."""
    return {field.alias or name: field for name, field in kind.model_fields.items()}


def table():
    rows = {}
    for of, kind in KINDS.items():
        for name, field in fields(kind).items():
            value = field.default
            plain = field.is_required() or hasattr(value, "model_dump") or value in (None, {}, [])
            default = "" if plain else f"`{json.dumps(value)}`"
            default = "required" if field.is_required() else default
            about = " ".join(field.description.split())
            rows.setdefault((name, default, about), []).append(of)
    lines = ["| field | of | default | |", "|---|---|---|---|"]
    for (name, default, about), of in sorted(rows.items(), key=lambda row: row[0][1] != "required"):
        where = "all" if len(of) == len(KINDS) else ", ".join(of)
        lines.append(f"| `{name}` | {where} | {default} | {about} |")
    return "\n".join(lines) + "\n"


def parts():
    """The page before, in and after the table."""
    before, rest = PAGE.read_text().split(BEGIN)
    found, after = rest.split(END)
    return before, found, after


if __name__ == "__main__":
    before, _, after = parts()
    PAGE.write_text(before + BEGIN + table() + END + after)
