"""Kept responses: answers of /v1/responses that clients may retrieve and continue."""

from __future__ import annotations

import json
from collections import OrderedDict
from threading import Lock
from typing import Any, NamedTuple, final

from kvkeep.serve.refused import RequestError
from kvkeep.serve.replies.response_replies import Keep
from kvkeep.serve.requests.responses import Item, ResponsesRequest


class _Response(NamedTuple):
    """A response, the items before it (both as JSON), and the name of its client's key."""

    client: str
    body: str
    items: str


@final
class Kept:
    """The newest responses, in memory. Thread-safe.

    Args:
        most_bytes: most bytes of all responses and the items before them; 0: none is kept.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes, self._nbytes, self._lock = most_bytes, 0, Lock()
        self._held = OrderedDict[str, _Response]()

    def following(self, asked: ResponsesRequest, client: str) -> Keep | None:
        """Put the items of `previous_response_id` before the request's own; return a function that
        keeps the response, or None if the response is not kept.

        Raises:
            RequestError: the server keeps no responses, or not the previous one.
        """
        if asked.store:
            self._require("store", "leave store out, and send all items of a conversation in input")
        if asked.previous_response_id is not None:
            field = "previous_response_id"
            self._require(field, "send all items of the conversation in input")
            before = self._get(asked.previous_response_id, client, field, 400)
            items = json.loads(before.items) + json.loads(before.body)["output"]
            asked.input[:0] = map(Item.model_validate, items)
        if not self._most_bytes or asked.store is False:
            return None
        given = json.dumps([item.model_dump(exclude_none=True) for item in asked.input])
        return lambda response: self._keep(
            response["id"], _Response(client, json.dumps(response), given)
        )

    def response(self, name: str, client: str) -> dict[str, Any]:
        """A client's kept response.

        Raises:
            RequestError: the response is not kept.
        """
        found: dict[str, Any] = json.loads(self._asked(name, client).body)
        return found

    def drop(self, name: str, client: str) -> dict[str, Any]:
        """Delete a client's response; return the body of the reply.

        Raises:
            RequestError: the response is not kept.
        """
        self._asked(name, client)
        with self._lock:
            self._remove(name)
        return {"id": name, "object": "response", "deleted": True}

    def _asked(self, name: str, client: str) -> _Response:
        self._require("response_id", "let clients keep responses")
        return self._get(name, client, "response_id", 404)

    def _require(self, field: str, otherwise: str) -> None:
        if not self._most_bytes:
            why = f"this server keeps no responses; start it with --responses 100MB, or {otherwise}"
            raise RequestError(f"{field}: {why}", field, "unsupported_parameter")

    def _get(self, name: str, client: str, field: str, status: int) -> _Response:
        with self._lock:
            found = self._held.get(name)
            if found is None or found.client != client:
                why = f"{field} is {name[:80]!a}, but no response with this id is kept"
                raise RequestError(why, field, "previous_response_not_found", status)
            self._held.move_to_end(name)
            return found

    def _keep(self, name: str, response: _Response) -> None:
        with self._lock:
            self._held[name] = response
            self._nbytes += _size(response)
            while self._nbytes > self._most_bytes:
                self._remove(next(iter(self._held)))

    def _remove(self, name: str) -> None:
        found = self._held.pop(name, None)
        self._nbytes -= 0 if found is None else _size(found)


def _size(response: _Response) -> int:
    return len(response.body) + len(response.items)
