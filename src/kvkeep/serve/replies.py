"""Replies in the format of OpenAI's API."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, final

from starlette.responses import Response

from kvkeep.serve.engine import Event, Finished, Piece, Used
from kvkeep.serve.requests import Asked, RequestError

DONE = "data: [DONE]\n\n"


@final
@dataclass
class Reply:
    """The answer to one request, as one object or as chunks of a stream."""

    asked: Asked
    created: int = field(default_factory=lambda: int(time.time()))
    identity: str = field(default_factory=lambda: uuid.uuid4().hex)

    def whole(self, events: list[Event]) -> dict[str, Any]:
        """The complete answer as one object; `events` must end with `Used`."""
        texts = ["".join(_pieces(events, index)) for index in range(self.asked.n)]
        reasons = {event.index: event.reason for event in events if isinstance(event, Finished)}
        choices = []
        for index, text in enumerate(texts):
            said = {"message": {"role": "assistant", "content": text, "refusal": None}}
            choices.append(self._choice(index, said if self.asked.chat else {"text": text}))
            choices[-1]["finish_reason"] = reasons[index]
        used = next(event for event in events if isinstance(event, Used))
        return self._object("chat.completion", choices) | {"usage": _usage(used)}

    def begun(self) -> Iterator[str]:
        """The first chunks of a stream."""
        if self.asked.chat:
            for index in range(self.asked.n):
                delta = {"delta": {"role": "assistant", "content": ""}}
                yield self._chunk([self._choice(index, delta)])

    def chunks(self, event: Event) -> Iterator[str]:
        """The chunks of a stream for one event."""
        if isinstance(event, Piece):
            delta = {"delta": {"content": event.text}} if self.asked.chat else {"text": event.text}
            yield self._chunk([self._choice(event.index, delta)])
        elif isinstance(event, Finished):
            choice = self._choice(event.index, {"delta": {}} if self.asked.chat else {"text": ""})
            yield self._chunk([choice | {"finish_reason": event.reason}])
        elif isinstance(event, RequestError):
            yield _data(event.body())
        else:
            if self.asked.include_usage:
                yield self._chunk([], _usage(event))
            yield DONE

    def _chunk(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> str:
        chunk = self._object("chat.completion.chunk", choices)
        return _data(chunk | ({"usage": usage} if self.asked.include_usage else {}))

    def _object(self, name: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chat = self.asked.chat
        return {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{self.identity}",
            "object": name if chat else "text_completion",
            "created": self.created,
            "model": self.asked.model,
            "choices": choices,
        }

    def _choice(self, index: int, said: dict[str, Any]) -> dict[str, Any]:
        return {"index": index, **said, "logprobs": None, "finish_reason": None}


def model(name: str, created: int) -> dict[str, Any]:
    """A model's entry in the list of models."""
    return {"id": name, "object": "model", "created": created, "owned_by": "kvkeep"}


def as_json(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A JSON response in ASCII, because it may quote a client's text that is not valid Unicode."""
    return Response(json.dumps(content), status, headers, media_type="application/json")


def refusal(error: RequestError) -> Response:
    """The response to a refused request."""
    headers = {}
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    if error.retry_s is not None:
        headers["retry-after"] = str(error.retry_s)
    return as_json(error.body(), error.status, headers)


def _pieces(events: list[Event], index: int) -> Iterator[str]:
    for event in events:
        if isinstance(event, Piece) and event.index == index:
            yield event.text


def _usage(used: Used) -> dict[str, Any]:
    return {
        "prompt_tokens": used.prompt,
        "completion_tokens": used.completion,
        "total_tokens": used.prompt + used.completion,
        "prompt_tokens_details": {"cached_tokens": used.cached},
    }


def _data(chunk: dict[str, Any]) -> str:
    """A server-sent event, escaped to ASCII because some clients treat U+2028 as a line break."""
    return f"data: {json.dumps(chunk)}\n\n"
