"""The server's endpoints, as a Starlette application."""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from http import HTTPStatus

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from kvkeep.serve import replies
from kvkeep.serve.engine import Engine, Event, Used
from kvkeep.serve.replies import Reply
from kvkeep.serve.requests import Asked, RequestError, read

BODY_LIMIT = 8 * 2**20
"""Most bytes of a request."""
_LEFT = 499  # the status of an answer that nobody waits for

_Endpoint = Callable[[Request], Awaitable[Response]]


def application(
    engine: Engine, *, api_key: str | None = None, body_limit: int = BODY_LIMIT
) -> Starlette:
    """The server of an engine, which is closed when the server shuts down.

    Args:
        api_key: what clients must send as a bearer token, to all but /health; None: nothing.
        body_limit: most bytes of a request.
    """
    started = int(time.time())

    async def health(request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [replies.model(engine.name, started)]})

    async def model(request: Request) -> Response:
        _require_model(engine, request.path_params["name"])
        return JSONResponse(replies.model(engine.name, started))

    async def chat(request: Request) -> Response:
        return await complete(request, chat=True)

    async def completions(request: Request) -> Response:
        return await complete(request, chat=False)

    async def complete(request: Request, *, chat: bool) -> Response:
        body = await _body(request, body_limit)

        def understood() -> tuple[Asked, list[int]]:
            asked = read(body, chat=chat)
            _require_model(engine, asked.model)
            return asked, engine.encode(asked)

        answer = _Answer(engine, *await asyncio.to_thread(understood))
        return _Stream(answer) if answer.asked.stream else await _whole(request, answer)

    def keyed(endpoint: _Endpoint) -> _Endpoint:
        async def checked(request: Request) -> Response:
            _require_key(request, api_key)
            return await endpoint(request)

        return checked

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(engine.close)

    return Starlette(
        routes=[
            Route("/health", health),
            Route("/v1/models", keyed(models)),
            Route("/v1/models/{name:path}", keyed(model)),
            Route("/v1/chat/completions", keyed(chat), methods=["POST"]),
            Route("/v1/completions", keyed(completions), methods=["POST"]),
        ],
        exception_handlers={
            RequestError: _refuse,
            HTTPException: _no_endpoint,
            ClientDisconnect: _leave,
            Exception: _fail,
        },
        lifespan=lifespan,
    )


class _Answer:
    """A request that is with the engine, and what came of it so far."""

    def __init__(self, engine: Engine, asked: Asked, ids: list[int]) -> None:
        self.asked = asked
        self.gone = threading.Event()
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def emit(event: Event) -> None:
            loop.call_soon_threadsafe(self._events.put_nowait, event)

        engine.submit(asked, ids, emit, self.gone)

    async def events(self) -> AsyncIterator[Event]:
        """All events, as they come."""
        while True:
            event = await self._events.get()
            yield event
            if isinstance(event, Used | RequestError):
                return


class _Stream(StreamingResponse):
    """An answer as server-sent events. A client that goes away ends it."""

    def __init__(self, answer: _Answer) -> None:
        self.answer = answer
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(self._chunks(), headers=headers, media_type="text/event-stream")

    async def _chunks(self) -> AsyncIterator[str]:
        reply = Reply(self.answer.asked)
        for chunk in reply.begun():
            yield chunk
        async for event in self.answer.events():
            for chunk in reply.chunks(event):
                yield chunk

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.answer.gone.set()


async def _whole(request: Request, answer: _Answer) -> Response:
    """An answer at once. A client that goes away ends it."""

    async def gathered() -> list[Event]:
        return [event async for event in answer.events()]

    async def left() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    gathering, leaving = asyncio.ensure_future(gathered()), asyncio.ensure_future(left())
    try:
        await asyncio.wait({gathering, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not gathering.done():
            return Response(status_code=_LEFT)
    finally:
        answer.gone.set()
        gathering.cancel()
        leaving.cancel()
    events = gathering.result()
    if isinstance(events[-1], RequestError):
        raise events[-1]
    return JSONResponse(Reply(answer.asked).whole(events))


async def _body(request: Request, limit: int) -> bytes:
    """A request's body; of one that is too large nothing more is read.

    Raises:
        RequestError: it is larger than the limit.
    """
    body = bytearray()
    length = request.headers.get("content-length", "")
    too_large = length.isdecimal() and int(length) > limit
    async with aclosing(request.stream()) as parts:
        while not too_large:
            part = await anext(parts, None)
            if part is None:
                return bytes(body)
            body += part
            too_large = len(body) > limit
    raise RequestError(
        f"the request is larger than {limit} bytes; send less", status=413, code="request_too_large"
    )


def _require_model(engine: Engine, name: str) -> None:
    if name != engine.name:
        raise RequestError(
            f"no model {name[:80]!a}; this server has {engine.name!r}",
            param="model",
            code="model_not_found",
            status=404,
        )


def _require_key(request: Request, key: str | None) -> None:
    kind, _, given = request.headers.get("authorization", "").partition(" ")
    if key is None or (
        kind.lower() == "bearer"
        and secrets.compare_digest(given.strip().encode("latin-1"), key.encode())
    ):
        return
    said = "a wrong API key" if given else "no API key"
    raise RequestError(
        f"{said}; send this server's as `Authorization: Bearer KEY`",
        code="invalid_api_key",
        status=401,
    )


def _error(error: RequestError) -> Response:
    headers = {"www-authenticate": "Bearer"} if error.status == 401 else None
    return JSONResponse(error.body(), status_code=error.status, headers=headers)


async def _refuse(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return _error(error)


async def _no_endpoint(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    phrase = HTTPStatus(error.status_code).phrase.lower()
    message = f"{request.method} {request.url.path}: {phrase}"
    return _error(RequestError(message, status=error.status_code))


async def _leave(request: Request, error: Exception) -> Response:
    return Response(status_code=_LEFT)


async def _fail(request: Request, error: Exception) -> Response:
    return _error(RequestError("the server failed; its log says why", status=500))
