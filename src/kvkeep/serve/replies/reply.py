"""Replies: the responses to requests, and to refused requests."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from typing import Any

from starlette.responses import Response

from kvkeep.serve.events import Event, Started, TextDelta, TokenLogprob, Usage
from kvkeep.serve.prompts.parts import REASONING, Call, Said
from kvkeep.serve.prompts.prompt import Encoded
from kvkeep.serve.refused import RequestError
from kvkeep.serve.requests.completions import Request


class Reply(ABC):
    """The answers to one request, as one object or as stream chunks. Construct it in an event loop.

    Attributes:
        outcome: the outcome by which the request is counted; "left" until the last event.
    """

    def __init__(self, request: Request, encoded: Encoded) -> None:
        self.request, self.outcome = request, "left"
        answers = len(encoded.prompts) * request.answers
        self._parts = [encoded.parts() for _ in range(answers)]
        self._reasoned = 0  # number of reasoning tokens
        self._id, self._created = uuid.uuid4().hex, int(time.time())
        self._loop, self._queue = asyncio.get_running_loop(), asyncio.Queue[Event]()

    def emit(self, event: Event) -> None:
        """Add an event; any thread may call it."""
        with suppress(RuntimeError):  # the event loop has ended
            self._loop.call_soon_threadsafe(self._queue.put_nowait, event)

    async def started(self) -> None:
        """Wait until the first answer starts.

        Raises:
            RequestError: the request failed before.
        """
        event = await self._queue.get()
        if isinstance(event, RequestError):
            raise event
        assert isinstance(event, Started)

    @abstractmethod
    async def whole(self) -> dict[str, Any]:
        """Wait for all answers; return them as one object.

        Raises:
            RequestError: an answer failed.
        """

    @abstractmethod
    def chunks(self) -> AsyncIterator[str]:
        """The answers as server-sent events."""

    async def _events(self) -> AsyncIterator[Event]:
        """The events after the first event."""
        while True:
            event = await self._queue.get()
            if isinstance(event, Usage | RequestError):
                self.outcome = event.outcome if isinstance(event, RequestError) else "answered"
                yield event
                return
            yield event

    def _said(self, piece: TextDelta) -> list[Said | Call]:
        """The parts in a piece of an answer's text."""
        parts = self._parts[piece.index]
        found = parts.push(piece.text, last=bool(piece.finish_reason))
        self._reasoned += parts.part == REASONING and not piece.finish_reason
        return found


_HEADERS = {
    401: {"www-authenticate": "Bearer"},
    429: {"retry-after": "5"},
    503: {"retry-after": "5"},
}
"""Error types by HTTP status."""


def model_object(name: str, created: int) -> dict[str, Any]:
    """A model's entry in the list of models."""
    return {"id": name, "object": "model", "created": created, "owned_by": "kvkeep"}


def as_json(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A JSON response in ASCII, because it may quote client text that is not valid Unicode."""
    return Response(json.dumps(content), status, headers, media_type="application/json")


def refusal(error: RequestError) -> Response:
    """The response for a refused request."""
    return as_json(error.body(), error.status, _HEADERS.get(error.status))


def with_bytes(one: TokenLogprob) -> dict[str, Any]:
    """A token with its logprob, and its bytes if known."""
    name = one.token
    known = None if name.bytes is None else list(name.bytes)
    return {"token": name.text, "logprob": one.logprob, "bytes": known}


def sent(data: str, name: str = "") -> str:
    """Encode a server-sent event."""
    return f"event: {name}\ndata: {data}\n\n" if name else f"data: {data}\n\n"
