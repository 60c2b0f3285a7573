"""Requests of all kinds, most of them wrong: each is answered for what it is, the next is right.

Which they are depends on a seed, so a failure comes again.
"""

from __future__ import annotations

import json
import random
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import httpx2
import openai
import pytest
from support.live_server import CONTEXT, JSON, asking, said, serving, small, until

from kvkeep.serve.limits import Limits

DEEP = "\N{BULLET}deep"  # stands for a list too deep to be written by Python
VALUES = [
    *(None, True, False, 0, 1, -1, 2, 0.5, -0.0, 1e308, 2**31, 2**63, -(2**63), 10**400),
    *(float("nan"), float("inf"), float("-inf"), "", " ", "a", "1", "none", "\x00", "\ud800"),
    *("é" * 100, "<|im_end|>", "a" * 2000, [], [[]], [None], [1], [-1], [2**40], ["a"], {}),
    *({"a": 1}, {"type": "text"}, [{}] * 50, ["a"] * 300, [5] * (CONTEXT + 1), DEEP),
]
FIELDS = [
    *("model", "messages", "prompt", "max_tokens", "max_completion_tokens", "temperature", "top_p"),
    *("stop", "seed", "n", "stream", "stream_options", "tools", "tool_choice", "logprobs"),
    *("top_logprobs", "logit_bias", "presence_penalty", "response_format", "echo", "suffix"),
    *("best_of", "user", "metadata", "functions", "modalities", "parallel_tool_calls", "\ud800"),
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "chat_template_kwargs"),
    *("continue_final_message", "min_tokens", "stop_token_ids", "ignore_eos", "reasoning_effort"),
]
MESSAGE = ["role", "content", "tool_calls", "tool_call_id", "name", "audio", "refusal"]
HEADERS = [
    *(JSON, {}, {"content-type": "text/plain"}, JSON | {"authorization": "Bearer \x7f"}),
    *(
        JSON | {"host": "evil.example"},
        JSON | {"origin": "null"},
        JSON | {"expect": "100-continue"},
    ),
    *(
        JSON | {"content-encoding": "gzip"},
        JSON | {"upgrade": "websocket", "connection": "upgrade"},
    ),
]
PATHS = ["chat/completions"] * 8 + ["completions"] * 4 + ["models", "models/%ff%00", "../health"]
PAGE = ["../", "../assets/chat.js", "../assets/inspect.html", "../assets/%2e%2e/picture.py"]


def wrong(draw):
    """A request's path, headers and body, in which one thing or several are wrong."""
    path = draw.choice(PATHS + PAGE)
    body = {"model": "tiny", "messages": asking("Hello."), "max_tokens": 2}
    if path == "completions":
        del body["messages"]
        body["prompt"] = "Hello."
    if draw.random() < 0.2:
        body |= {"stream": True, "stream_options": {"include_cache": True}}
    for _ in range(draw.choice((0, 1, 1, 1, 2, 5))):
        body[draw.choice(FIELDS)] = draw.choice(VALUES)
    if draw.random() < 0.3 and isinstance(body.get("messages"), list):
        message = {"role": "user", "content": "Hello."}
        message[draw.choice(MESSAGE)] = draw.choice(VALUES)
        body["messages"] = [message] * draw.choice((1, 2, 30))
    text = json.dumps(body)
    if draw.random() < 0.1:
        text = text.replace("{", '{"model": "tiny", ', 1)  # a second time
    depth = draw.choice((30, 200, 900, 980, 10**5))
    content = text.replace(json.dumps(DEEP), "[" * depth + "]" * depth).encode()
    if draw.random() < 0.1:
        content = bytearray(content)
        for _ in range(3):
            content[draw.randrange(len(content))] = draw.randrange(256)
    headers = draw.choice(HEADERS) if draw.random() < 0.2 else JSON
    return path, headers, bytes(content)


def vanish(base, draw):
    """Send a request, or a part of it, and go away."""
    path, headers, body = wrong(draw)
    lines = [f"POST /v1/{path} HTTP/1.1", "host: localhost", f"content-length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in headers.items() if name != "host"]
    whole = "\r\n".join([*lines, "", ""]).encode() + body
    with socket.create_connection((base.host, base.port)) as end, suppress(ConnectionError):
        end.sendall(whole[: draw.randrange(len(whole) + 1)])
        time.sleep(draw.choice((0, 0.01, 0.1)))


@pytest.fixture(scope="module")
def harbour(tokenizer):
    """A server whose answers are short, whatever they are asked for."""
    with serving(small(), tokenizer, limits=Limits(answer_tokens=64)) as both:
        yield both


def storm(harbour, seed, requests, clients):
    """Wrong requests, each followed by nothing worse than a refusal, and what is right meanwhile.

    Returns how often each status came."""
    engine, talk = harbour

    def ask():
        create = talk.chat.completions.create
        return create(model="tiny", messages=asking("Hello."), temperature=0, max_tokens=12)

    expected = said(ask())
    seen: dict[int, int] = {}

    def rage(client):
        draw = random.Random(f"{seed} {client}")
        with httpx2.Client(trust_env=False, timeout=120) as http:
            for _ in range(requests // clients):
                path, headers, body = wrong(draw)
                method = draw.choice(("GET", "POST")) if path in PAGE else "POST"
                url = f"{talk.base_url}{path}"
                answer = http.request(method, url, content=body, headers=headers)
                assert answer.status_code < 500, (answer.text, path, headers, body)
                if answer.status_code >= 400:
                    assert answer.json()["error"]["message"], body
                seen[answer.status_code] = seen.get(answer.status_code, 0) + 1
                if draw.random() < 0.2:
                    vanish(talk.base_url, draw)
                if draw.random() < 0.05:
                    with suppress(openai.RateLimitError):
                        assert said(ask()) == expected

    with ThreadPoolExecutor(clients) as threads:
        for one in [threads.submit(rage, client) for client in range(clients)]:
            one.result()
    until(lambda: not engine.waiting)
    assert said(ask()) == expected
    return seen


def test_a_storm_of_wrong_requests(harbour):
    seen = storm(harbour, seed=1, requests=120, clients=3)
    assert seen[200] > 10
    assert seen[400] > 30


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_a_long_storm_of_wrong_requests(harbour, seed):
    seen = storm(harbour, seed=f"long {seed}", requests=1500, clients=8)
    assert set(seen) <= {200, 400, 403, 404, 405, 413, 415, 421, 429}, seen
