"""`kvkeep serve` in a process of its own, and as many clients as there are requests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from kvkeep.errors import KVKeepError
from kvkeep_lab.bench.workload import Request, Served

_PATIENCE = 3600  # seconds


class Server(NamedTuple):
    """The address of a server, and the name of its model."""

    url: str
    model: str


@contextmanager
def server(
    model: Any, tokenizer: Any, spec: str, directory: Path, clients: int
) -> Iterator[Server]:
    """A server of this model, which keeps no prompts.

    Args:
        directory: directory for the model's files, which are written once.
        clients: how many requests there may be at a time.

    Raises:
        KVKeepError: it did not start.
    """
    saved = directory / "served"
    if not saved.exists():
        model.save_pretrained(saved)
        tokenizer.save_pretrained(saved)
    dtype, limit = str(model.dtype).removeprefix("torch."), str(_PATIENCE)
    command = [sys.executable, "-m", "kvkeep", "serve", "--port", "0", "--model", str(saved)]
    command += ["--cache", spec, "--dtype", dtype, "--device", str(model.device), "--no-share"]
    command += ["--sequences", str(clients), "--queue", str(clients)]
    command += ["--wait", limit, "--timeout", limit]
    environment = {name: x for name, x in os.environ.items() if name != "KVKEEP_API_KEY"}
    piped: dict[str, Any] = {"stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, **piped) as process:
        try:
            assert process.stdout is not None
            said = process.stdout.readline().split()
            if not said:
                raise KVKeepError("kvkeep serve did not start; see its error above")
            yield Server(said[-1], str(saved))
        finally:
            process.terminate()


def stream(server: Server, requests: Sequence[Request], new: int) -> Served:
    """Send each request when it arrives, in a thread of its own, and read its answer's stream.
    Pieces of text count as tokens: a token that does not complete a character comes with the next.
    """
    start = time.perf_counter()

    def asked(request: Request) -> tuple[list[float], int]:
        time.sleep(max(0.0, request.at - (time.perf_counter() - start)))
        return _answer(server, request, new, start)

    with ThreadPoolExecutor(len(requests)) as threads:
        answers = list(threads.map(asked, requests))
    times, counts = [list(part) for part in zip(*answers, strict=True)]
    return Served(requests, times, None, counts).require(new)


def _answer(server: Server, request: Request, new: int, start: float) -> tuple[list[float], int]:
    """The seconds at which an answer's pieces came, and its number of tokens."""
    body = {"model": server.model, "prompt": request.ids.tolist(), "max_tokens": new}
    body |= {"temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
    times, count = list[float](), 0
    address = urlsplit(server.url).netloc
    with closing(HTTPConnection(address, timeout=_PATIENCE)) as connection:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        response = connection.getresponse()
        if response.status != 200:
            raise KVKeepError(f"kvkeep serve answered {response.status}: {response.read()[:200]!r}")
        for line in response:
            kind, _, data = line.decode().strip().partition(": ")
            if kind != "data" or data == "[DONE]":
                continue
            event = json.loads(data)
            if "error" in event:
                raise KVKeepError(f"kvkeep serve ended an answer: {event['error']}")
            if any(choice["text"] for choice in event["choices"]):
                times.append(time.perf_counter() - start)
            if event.get("usage"):
                count = event["usage"]["completion_tokens"]
    return times, count
