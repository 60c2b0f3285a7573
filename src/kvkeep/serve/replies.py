"""Replies in the format of OpenAI's API."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import suppress
from typing import Any, final

from starlette.responses import Response

from kvkeep.serve.events import Event, Picture, Started, TextDelta, TokenLogprob, Usage
from kvkeep.serve.requests import Request, RequestError


@final
class Reply:
    """The answers to one request, as one object or as chunks of a stream. It must be made in an
    event loop.

    Attributes:
        outcome: how the request is counted; until its last event, its client is taken to have
            left.
    """

    def __init__(self, request: Request) -> None:
        self.request, self.outcome = request, "left"
        self._id, self._created = uuid.uuid4().hex, int(time.time())
        self._loop, self._queue = asyncio.get_running_loop(), asyncio.Queue[Event]()

    def emit(self, event: Event) -> None:
        """Add an event; may be called from any thread."""
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._queue.put_nowait, event)

    async def started(self) -> None:
        """Wait until the first answer starts.

        Raises:
            RequestError: it never does.
        """
        event = await self._queue.get()
        if isinstance(event, RequestError):
            raise event
        assert isinstance(event, Started)

    async def whole(self) -> dict[str, Any]:
        """All answers, when they are complete, as one object.

        Raises:
            RequestError: one failed.
        """
        pieces: list[list[TextDelta]] = [[] for _ in range(self.request.n)]
        async for event in self._events():
            if isinstance(event, TextDelta):
                pieces[event.index].append(event)
            elif isinstance(event, RequestError):
                raise event
            elif isinstance(event, Usage):
                usage = _usage(event)
        return self._object("chat.completion", map(self._choice, pieces)) | {"usage": usage}

    async def chunks(self) -> AsyncIterator[str]:
        """The answers as server-sent events."""
        if self.request.chat:
            for index in range(self.request.n):
                role = {"delta": {"role": "assistant", "content": ""}}
                yield self._chunk([{"index": index, **role, **_NOTHING}])
        async for event in self._events():
            if isinstance(event, TextDelta):
                yield self._chunk([self._choice([event], delta=True)])
            elif isinstance(event, Picture):
                yield self._chunk([], cache=event.json)
                event.received()
            elif isinstance(event, RequestError):
                yield _sent(json.dumps(event.body()))
            elif isinstance(event, Usage):
                if self.request.stream_options.include_usage:
                    yield self._chunk([], usage=_usage(event))
                yield _sent("[DONE]")

    async def _events(self) -> AsyncIterator[Event]:
        """The events after the first."""
        while True:
            event = await self._queue.get()
            if isinstance(event, Usage | RequestError):
                self.outcome = event.outcome if isinstance(event, RequestError) else "answered"
                yield event
                return
            yield event

    def _chunk(
        self,
        choices: list[dict[str, Any]],
        *,
        usage: dict[str, Any] | None = None,
        cache: str | None = None,
    ) -> str:
        """A chunk of a stream; `cache` is JSON."""
        chunk = self._object("chat.completion.chunk", choices)
        if self.request.stream_options.include_usage:
            chunk["usage"] = usage
        # Escaped to ASCII because some clients treat U+2028 as a line break.
        text = json.dumps(chunk)
        return _sent(text if cache is None else f'{text[:-1]}, "cache": {cache}}}')

    def _object(self, name: str, choices: Iterable[dict[str, Any]]) -> dict[str, Any]:
        chat = self.request.chat
        return {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{self._id}",
            "object": name if chat else "text_completion",
            "created": self._created,
            "model": self.request.model,
            "choices": list(choices),
        }

    def _choice(self, pieces: list[TextDelta], *, delta: bool = False) -> dict[str, Any]:
        """An answer, or pieces of one that follow each other."""
        text, chat = "".join(piece.text for piece in pieces), self.request.chat
        said: dict[str, Any] = {"text": text}
        if chat and delta:
            said = {"delta": {"content": text} if text else {}}
        elif chat:
            said = {"message": {"role": "assistant", "content": text, "refusal": None}}
        choice = {"index": pieces[0].index, **said, **_NOTHING}
        if self.request.top_logprobs is not None:
            tokens = [piece for piece in pieces if piece.logprobs]
            choice["logprobs"] = _chat_logprobs(tokens) if chat else _completion_logprobs(tokens)
        choice["finish_reason"] = pieces[-1].finish_reason or None
        return choice


_HEADERS = {
    401: {"www-authenticate": "Bearer"},
    429: {"retry-after": "5"},
    503: {"retry-after": "5"},
}
"""Of refusals, by their status."""

_NOTHING = {"logprobs": None, "finish_reason": None}


def model(name: str, created: int) -> dict[str, Any]:
    """A model's entry in the list of models."""
    return {"id": name, "object": "model", "created": created, "owned_by": "kvkeep"}


def as_json(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A JSON response in ASCII, because it may quote a client's text that is not valid Unicode."""
    return Response(json.dumps(content), status, headers, media_type="application/json")


def refusal(error: RequestError) -> Response:
    """The response to a refused request."""
    return as_json(error.body(), error.status, _HEADERS.get(error.status))


def _chat_logprobs(tokens: list[TextDelta]) -> dict[str, Any]:
    content = [
        _with_bytes(piece.logprobs[0]) | {"top_logprobs": [*map(_with_bytes, piece.logprobs[1:])]}
        for piece in tokens
    ]
    return {"content": content, "refusal": None}


def _completion_logprobs(tokens: list[TextDelta]) -> dict[str, Any]:
    return {
        "tokens": [piece.logprobs[0].token for piece in tokens],
        "token_logprobs": [piece.logprobs[0].logprob for piece in tokens],
        # The chosen token too, which is the first, though it may not be among the likeliest.
        "top_logprobs": [
            dict(reversed((*piece.logprobs[1:], piece.logprobs[0]))) if piece.logprobs[1:] else {}
            for piece in tokens
        ],
        "text_offset": [piece.offset for piece in tokens],
    }


def _with_bytes(one: TokenLogprob) -> dict[str, Any]:
    """A token with its bytes, which are not known of a token that is a part of a character."""
    known = "\ufffd" not in one.token
    return one._asdict() | {"bytes": list(one.token.encode()) if known else None}


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
    }


def _sent(data: str) -> str:
    """A server-sent event."""
    return f"data: {data}\n\n"
