"""Recorded sessions of the server, one for each endpoint. To record them again:

PYTHONPATH=tests python -m support.recorded

What the model says is scripted, so recordings tell how the server writes it. Ids and times are
replaced, because they differ each time.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import httpx2

from support.live_server import JSON, scripted, serving, small
from support.short_tokenizer import short_tokenizer

FOLDER = Path(__file__).parents[1] / "serve" / "recorded"
TEMPLATE = (
    "{{ tools | tojson if tools }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{# <tool_call> </think> #}"
)
SAID = '<think>Hm.</think>Yes.<tool_call>{"name": "tide", "arguments": {"at": 3}}</tool_call>'
FUNCTION = {"name": "tide", "parameters": {"properties": {"at": {"type": "integer"}}}}
CHAT = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "Tide?"}],
    "tools": [{"type": "function", "function": FUNCTION}],
    "max_completion_tokens": 200,
}
TEXT = {"model": "tiny", "prompt": "Tide?", "max_tokens": 3}
RESPONSE = {
    "model": "tiny",
    "input": "Tide?",
    "tools": [{"type": "function", **FUNCTION}],
    "max_output_tokens": 200,
}
STREAM = {"stream": True}
SESSIONS = {
    "models": ("models", None),
    "model": ("models/tiny", None),
    "tokenize": ("../tokenize", {"prompt": "Tide?", "return_token_strs": True}),
    "detokenize": ("../detokenize", {"tokens": [5, 6]}),
    "health": ("../health", None),
    "chat": ("chat/completions", CHAT),
    "chat_stream": (
        "chat/completions",
        CHAT | STREAM | {"stream_options": {"include_usage": True}},
    ),
    "completions": ("completions", TEXT),
    "completions_stream": ("completions", TEXT | STREAM),
    "responses": ("responses", RESPONSE),
    "responses_stream": ("responses", RESPONSE | STREAM),
    "refusal": ("chat/completions", CHAT | {"model": "other"}),
}
_CHANGING = {"id", "call_id", "item_id", "created", "created_at", "completed_at"}


def answered():
    """What the server answers to each session: an object, or a stream's objects."""
    tokenizer = short_tokenizer()
    kept, tokenizer.chat_template = tokenizer.chat_template, TEMPLATE
    try:
        with (
            serving(small(), tokenizer, share=False) as (_, talk),
            scripted(tokenizer, SAID),
            httpx2.Client(trust_env=False, headers=JSON) as http,
        ):
            for name, (path, body) in SESSIONS.items():
                url = f"{talk.base_url}{path}"
                got = http.get(url) if body is None else http.post(url, json=body)
                yield name, _objects(got.text)
    finally:
        tokenizer.chat_template = kept


def _objects(text):
    if text.startswith("{"):
        return json.loads(text)
    found = re.findall(r"^data: (\{.*\})$", text, flags=re.MULTILINE)
    return [json.loads(one) for one in found]


def without_changes(given):
    """An answer, with 0 or "" in place of what differs each time."""
    if isinstance(given, list):
        return [without_changes(one) for one in given]
    if not isinstance(given, dict):
        return given
    return {
        key: (type(value)() if key in _CHANGING else without_changes(value))
        for key, value in given.items()
    }


def recorded(name):
    return json.loads((FOLDER / f"{name}.json").read_text())


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, answer in answered():
        text = json.dumps(without_changes(answer), indent=1, ensure_ascii=False)
        (FOLDER / f"{name}.json").write_text(text + "\n")
