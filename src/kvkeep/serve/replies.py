"""Replies in the format of OpenAI's API."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, final

from starlette.responses import Response

from kvkeep.serve.events import (
    Event,
    Picture,
    Scored,
    Started,
    TextDelta,
    TokenLogprob,
    Usage,
)
from kvkeep.serve.parts import CONTENT, REASONING, Call, Parts, Said
from kvkeep.serve.refused import RequestError
from kvkeep.serve.requests import Request


@final
class Reply:
    """The answers to one request, as one object or as chunks of a stream. It must be made in an
    event loop.

    Args:
        prompts: how many prompts it has.
        parts: makes the parser of an answer; None: answers are plain text.

    Attributes:
        outcome: how the request is counted; until its last event, its client is taken to have
            left.
    """

    def __init__(
        self, request: Request, prompts: int = 1, parts: Callable[[], Parts] | None = None
    ) -> None:
        self.request, self.outcome = request, "left"
        self._prompts, answers = prompts, prompts * request.answers
        self._parts = [Parts(None) if parts is None else parts() for _ in range(answers)]
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
        pieces: list[list[TextDelta]] = [[] for _ in self._parts]
        async for event in self._events():
            if isinstance(event, TextDelta):
                pieces[event.index].append(event)
            elif isinstance(event, RequestError):
                raise event
            elif isinstance(event, Usage):
                usage = _usage(event)
        answers = self.request.answers
        groups = (pieces[at : at + answers] for at in range(0, len(pieces), answers))
        best = [one for group in groups for one in self._best(group)]
        choices = [self._choice(index, own) for index, own in enumerate(best)]
        return self._object("chat.completion", choices) | {"usage": usage}

    def _best(self, answers: list[list[TextDelta]]) -> list[list[TextDelta]]:
        """The n of a prompt's answers that its client gets."""

        def mean(pieces: list[TextDelta]) -> float:
            tokens = [one for piece in pieces if not piece.echo for one in piece.logprobs]
            return sum(one.chosen.logprob or 0 for one in tokens) / max(len(tokens), 1)

        if len(answers) == self.request.n:
            return answers
        return sorted(answers, key=mean, reverse=True)[: self.request.n]

    async def chunks(self) -> AsyncIterator[str]:
        """The answers as server-sent events."""
        if self.request.chat:
            for index in range(len(self._parts)):
                role = {"delta": {"role": "assistant", "content": ""}}
                yield self._chunk([{"index": index, **role, **_NOTHING}])
        async for event in self._events():
            if isinstance(event, TextDelta):
                for choice in self._deltas(event):
                    yield self._chunk([choice])
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

    def _choice(self, index: int, pieces: list[TextDelta]) -> dict[str, Any]:
        """A whole answer."""
        parts = self._parts[pieces[0].index]
        text = "".join(piece.text for piece in pieces)
        said: dict[str, Any] = {"text": text}
        if self.request.chat:
            said = {"message": _message(parts.push(text, last=True))}
        return {"index": index, **said, **self._about(pieces, parts)}

    def _deltas(self, piece: TextDelta) -> list[dict[str, Any]]:
        """Choices for the chunks of a stream, for a piece of an answer."""
        parts, last = self._parts[piece.index], bool(piece.finish_reason)
        said: list[dict[str, Any]] = [{"text": piece.text}]
        if self.request.chat:
            said = [{"delta": one} for one in _message_deltas(parts.push(piece.text, last=last))]
            if not said and (piece.logprobs or last):
                said = [{"delta": {}}]
        choices = [{"index": piece.index, **one, **_NOTHING} for one in said]
        for choice in choices[-1:]:
            choice |= self._about([piece], parts)
        return choices

    def _about(self, pieces: list[TextDelta], parts: Parts) -> dict[str, Any]:
        """The logprobs of pieces of an answer, and why it ended with them."""
        about: dict[str, Any] = dict(_NOTHING)
        reason = pieces[-1].finish_reason
        if self.request.top_logprobs is not None:
            tokens = [one for piece in pieces for one in piece.logprobs]
            scores = _chat_logprobs if self.request.chat else _completion_logprobs
            about["logprobs"] = scores(tokens)
        if reason:
            about["finish_reason"] = "tool_calls" if parts.calls and reason == "stop" else reason
        return about


def _message(said: list[Said | Call]) -> dict[str, Any]:
    """A message of an assistant."""
    text = dict.fromkeys((CONTENT, REASONING), "")
    for one in said:
        if isinstance(one, Said):
            text[one.part] += one.text
    calls = [_call(one) for one in said if isinstance(one, Call)]
    content = None if calls and not text[CONTENT] else text[CONTENT]
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if text[REASONING]:
        message[REASONING] = text[REASONING]
    return message | ({"tool_calls": calls} if calls else {})


def _message_deltas(said: list[Said | Call]) -> list[dict[str, Any]]:
    """The parts of a message in a stream: a call's name first, then its arguments."""
    deltas: list[dict[str, Any]] = []
    for one in said:
        if isinstance(one, Said):
            deltas.append({one.part: one.text})
            continue
        begun = _call(one._replace(arguments="")) | {"index": one.number}
        deltas.append({"tool_calls": [begun]})
        arguments = {"index": one.number, "function": {"arguments": one.arguments}}
        deltas.append({"tool_calls": [arguments]})
    return deltas


def _call(call: Call) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


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


def _chat_logprobs(tokens: list[Scored]) -> dict[str, Any]:
    content = [
        _with_bytes(one.chosen) | {"top_logprobs": [*map(_with_bytes, one.top)]} for one in tokens
    ]
    return {"content": content, "refusal": None}


def _completion_logprobs(tokens: list[Scored]) -> dict[str, Any]:
    return {
        "tokens": [one.chosen.token.text for one in tokens],
        "token_logprobs": [one.chosen.logprob for one in tokens],
        "top_logprobs": [_by_name(one) for one in tokens],
        "text_offset": [one.offset for one in tokens],
    }


def _by_name(one: Scored) -> dict[str, float | None] | None:
    """The likeliest tokens, and the chosen one, though it may not be among them."""
    if one.chosen.logprob is None:
        return None
    every = (*one.top, one.chosen) if one.top else ()
    return {each.token.text: each.logprob for each in reversed(every)}


def _with_bytes(one: TokenLogprob) -> dict[str, Any]:
    name = one.token
    known = None if name.bytes is None else list(name.bytes)
    return {"token": name.text, "logprob": one.logprob, "bytes": known}


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
