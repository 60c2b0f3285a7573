"""Replies in the format of OpenAI's API."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, final

from starlette.responses import Response

from kvkeep.serve.events import Event, Finished, Named, Pictured, Piece, TokenLogprobs, Used
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
        reasons = {event.index: event.reason for event in events if isinstance(event, Finished)}
        choices = []
        for index in range(self.asked.n):
            pieces = [e for e in events if isinstance(e, Piece) and e.index == index]
            text = "".join(piece.text for piece in pieces)
            said = {"message": {"role": "assistant", "content": text, "refusal": None}}
            choice = self._choice(index, said if self.asked.chat else {"text": text})
            choices.append(
                choice | {"finish_reason": reasons[index], "logprobs": self._logprobs(pieces)}
            )
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
            choice = self._choice(event.index, delta)
            yield self._chunk([choice | {"logprobs": self._logprobs([event])}])
        elif isinstance(event, Pictured):
            yield self._chunk([], cache=event.made)
        elif isinstance(event, Finished):
            choice = self._choice(event.index, {"delta": {}} if self.asked.chat else {"text": ""})
            yield self._chunk([choice | {"finish_reason": event.reason}])
        elif isinstance(event, RequestError):
            yield _data(event.body())
        elif isinstance(event, Used):
            if self.asked.include_usage:
                yield self._chunk([], _usage(event))
            yield DONE

    def _chunk(
        self,
        choices: list[dict[str, Any]],
        usage: dict[str, Any] | None = None,
        cache: str | None = None,
    ) -> str:
        """A chunk of a stream; `cache` is JSON."""
        chunk = self._object("chat.completion.chunk", choices)
        return _data(chunk | ({"usage": usage} if self.asked.include_usage else {}), cache)

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

    def _logprobs(self, pieces: Iterable[Piece]) -> dict[str, Any] | None:
        if not self.asked.logprobs:
            return None
        of_tokens = [piece.logprobs for piece in pieces if piece.logprobs is not None]
        return _in_chat(of_tokens) if self.asked.chat else _in_completions(of_tokens)


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


def _in_chat(of_tokens: list[TokenLogprobs]) -> dict[str, Any]:
    content = [
        _named(one.chosen) | {"top_logprobs": [_named(other) for other in one.likeliest]}
        for one in of_tokens
    ]
    return {"content": content, "refusal": None}


def _in_completions(of_tokens: list[TokenLogprobs]) -> dict[str, Any]:
    return {
        "tokens": [one.chosen.token for one in of_tokens],
        "token_logprobs": [one.chosen.logprob for one in of_tokens],
        # The chosen token too, though it may not be among the likeliest.
        "top_logprobs": [
            dict(reversed((*one.likeliest, one.chosen))) if one.likeliest else {}
            for one in of_tokens
        ],
        "text_offset": [one.offset for one in of_tokens],
    }


def _named(one: Named) -> dict[str, Any]:
    """A token with its bytes, which are not known of one that is a part of a character."""
    whole = "\ufffd" not in one.token
    return {
        "token": one.token,
        "logprob": one.logprob,
        "bytes": list(one.token.encode()) if whole else None,
    }


def _usage(used: Used) -> dict[str, Any]:
    return {
        "prompt_tokens": used.prompt,
        "completion_tokens": used.completion,
        "total_tokens": used.prompt + used.completion,
        "prompt_tokens_details": {"cached_tokens": used.cached},
    }


def _data(chunk: dict[str, Any], cache: str | None = None) -> str:
    """A server-sent event, escaped to ASCII because some clients treat U+2028 as a line break."""
    text = json.dumps(chunk)
    if cache is not None:  # large, and JSON already
        text = f'{text[:-1]}, "cache": {cache}}}'
    return f"data: {text}\n\n"
