"""Replies to requests for responses: an object whose items grow, and its stream of events."""

from __future__ import annotations

import copy
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, final

from kvkeep.serve.events import Scored, TextDelta, TokenLogprob, Usage
from kvkeep.serve.prompts.parts import CONTENT, REASONING, Call, Said
from kvkeep.serve.prompts.prompt import Encoded
from kvkeep.serve.refused import RequestError
from kvkeep.serve.replies.reply import Reply, sent, with_bytes
from kvkeep.serve.requests.completions import Request
from kvkeep.serve.requests.responses import ResponsesRequest

_TEXTS = {
    CONTENT: ("message", "msg", "output_text"),
    REASONING: ("reasoning", "rs", "reasoning_text"),
}
"""For each part of an answer: its item's type, the prefix of the item's id, and the type of the
item's content."""

_Object = dict[str, Any]
Keep = Callable[[_Object], None]
"""Keeps a response."""


@final
class Items:
    """The items of an answer while it is generated.

    Args:
        scored: whether texts have logprobs.

    Attributes:
        made: the items.
    """

    def __init__(self, *, scored: bool) -> None:
        self.made: list[_Object] = []
        self._scored, self._pending = scored, list[_Object]()
        self._open = ""  # part of the open item; empty: no item is open

    def push(self, said: Sequence[Said | Call], tokens: Sequence[Scored]) -> list[_Object]:
        """The events for the next piece of an answer.

        Args:
            tokens: tokens of the piece; they may complete earlier text.
        """
        events: list[_Object] = []
        parts = [one.part if isinstance(one, Said) else "" for one in said]
        if parts and parts[0] != CONTENT:
            self._pending = []
        if self._scored:
            self._pending += map(_logprob, tokens)
        for part, one in zip(parts, said, strict=True):
            if part != self._open:
                events += self._close("completed")
            events += self._text(one) if isinstance(one, Said) else self._call(one)
        if parts and parts[-1] != CONTENT:
            self._pending = []
        return events

    def end(self, status: str) -> list[_Object]:
        """The events at the end of an answer. An answer without text gets an empty message."""
        events = [] if self.made else self._text(Said(CONTENT, ""))
        if self._open == CONTENT:
            self.made[-1]["content"][0]["logprobs"] += self._pending  # of the end token
        return events + self._close(status)

    def _close(self, status: str) -> list[_Object]:
        """The events that complete the open item, if any."""
        if not self._open:
            return []
        kind, part = _TEXTS[self._open][2], self.made[-1]["content"][0]
        scores = {"logprobs": _brief(part["logprobs"])} if self._open == CONTENT else {}
        self._open = ""
        done = self._event(f"{kind}.done", content_index=0, text=part["text"], **scores)
        closed = self._event("content_part.done", content_index=0, part=part)
        return [done, closed, *self._done(status)]

    def _text(self, said: Said) -> list[_Object]:
        events: list[_Object] = []
        item_type, mark, kind = _TEXTS[said.part]
        if not self._open:
            self._open = said.part
            item = _begun(mark, item_type)
            own: _Object = {"role": "assistant"} if said.part == CONTENT else {"summary": []}
            item |= own
            part: _Object = {"type": kind, "text": ""}
            if said.part == CONTENT:
                part |= {"annotations": [], "logprobs": []}
            self.made.append(item)
            events += [
                self._event("output_item.added", item=item | {"content": []}),
                self._event("content_part.added", content_index=0, part=part),
            ]
            item["content"] = [copy.deepcopy(part)]
        part, scores = self.made[-1]["content"][0], {}
        if said.part == CONTENT:
            part["logprobs"] += self._pending
            scores, self._pending = {"logprobs": _brief(self._pending)}, []
        part["text"] += said.text
        if said.text:
            events.append(self._event(f"{kind}.delta", content_index=0, delta=said.text, **scores))
        return events

    def _call(self, call: Call) -> list[_Object]:
        item = _begun("fc", "function_call")
        item |= {"call_id": call.id, "name": call.name, "arguments": ""}
        self.made.append(item)
        events = [self._event("output_item.added", item=dict(item))]
        item["arguments"] = call.arguments
        return [
            *events,
            self._event("function_call_arguments.delta", delta=call.arguments),
            self._event("function_call_arguments.done", arguments=call.arguments),
            *self._done("completed"),
        ]

    def _done(self, status: str) -> list[_Object]:
        self.made[-1]["status"] = status
        return [self._event("output_item.done", item=self.made[-1])]

    def _event(self, name: str, /, **fields: Any) -> _Object:
        """An event about the last item."""
        where = {"output_index": len(self.made) - 1}
        if "item" not in fields:
            where["item_id"] = self.made[-1]["id"]
        return {"type": f"response.{name}", **where, **fields}


@final
class ResponseReply(Reply):
    """A response. As one object, it is the content of the stream's last event.

    Args:
        about: the response's fields that repeat the request.
        keep: called with the complete response; None: it is not kept.
    """

    def __init__(
        self, request: Request, encoded: Encoded, about: _Object, keep: Keep | None
    ) -> None:
        super().__init__(request, encoded)
        self._about, self._keep = about, keep
        self._items = Items(scored=request.top_logprobs is not None)

    async def whole(self) -> _Object:
        async for event in self._objects():
            last = event
        response: _Object = last["response"]
        return response

    async def chunks(self) -> AsyncIterator[str]:
        number = 0
        try:
            async for event in self._objects():
                yield _sent(event, number)
                number += 1
        except RequestError as error:
            error = error.renamed(ResponsesRequest.names)
            code = "server_error" if error.status >= 500 else "invalid_prompt"
            about = {"code": code, "message": error.message}
            yield _sent(self._response("failed", error=about), number)

    async def _objects(self) -> AsyncIterator[_Object]:
        """The events of a response.

        Raises:
            RequestError: the answer failed.
        """
        yield self._response("in_progress", "created")
        yield self._response("in_progress")
        reason = ""
        async for event in self._events():
            if isinstance(event, RequestError):
                raise event
            if isinstance(event, TextDelta):
                reason = event.finish_reason
                for one in self._items.push(self._said(event), event.logprobs):
                    yield one
            elif isinstance(event, Usage):
                status = "incomplete" if reason == "length" else "completed"
                for one in self._items.end(status):
                    yield one
                why = {"reason": "max_output_tokens"} if reason == "length" else None
                usage = self._usage(event)
                done = None if why else int(time.time())
                ended: _Object = {"incomplete_details": why, "usage": usage, "completed_at": done}
                last = self._response(status, **ended)
                if self._keep is not None:
                    self._keep(last["response"])
                yield last

    def _response(self, status: str, name: str = "", **fields: Any) -> _Object:
        """An event with the whole response in its current state."""
        response = {
            "id": f"resp_{self._id}",
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "output": self._items.made,
            "usage": None,
            **self._about,
            **fields,
        }
        return {"type": f"response.{name or status}", "response": response}

    def _usage(self, usage: Usage) -> _Object:
        return {
            "input_tokens": usage.prompt,
            # Cache writes are not billed, so they are not counted.
            "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
            "output_tokens": usage.completion,
            "output_tokens_details": {"reasoning_tokens": self._reasoned},
            "total_tokens": usage.prompt + usage.completion,
        }


def _begun(mark: str, kind: str) -> _Object:
    return {"id": f"{mark}_{uuid.uuid4().hex}", "type": kind, "status": "in_progress"}


def _sent(event: _Object, number: int) -> str:
    # Escaped to ASCII because some clients treat U+2028 as a line break.
    return sent(json.dumps(event | {"sequence_number": number}), event["type"])


def _logprob(one: Scored) -> _Object:
    return _known(one.chosen) | {"top_logprobs": [*map(_known, one.top)]}


def _brief(logprobs: list[_Object]) -> list[_Object]:
    """Logprobs as OpenAI's API defines them in stream events: without bytes."""
    return [
        {"token": one["token"], "logprob": one["logprob"]}
        | ({"top_logprobs": _brief(one["top_logprobs"])} if "top_logprobs" in one else {})
        for one in logprobs
    ]


def _known(one: TokenLogprob) -> _Object:
    """OpenAI's type does not allow null for unknown bytes."""
    return with_bytes(one) | ({"bytes": []} if one.token.bytes is None else {})
