"""The server's endpoints, as a Starlette application."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from http import HTTPStatus
from typing import NamedTuple, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send
from torch import Tensor

from kvkeep.serve import replies
from kvkeep.serve.engine import Engine
from kvkeep.serve.events import Begun, Event, Pictured, Used
from kvkeep.serve.gate import Gate, host_names, origin_names
from kvkeep.serve.keys import Keys
from kvkeep.serve.limits import Limits
from kvkeep.serve.metrics import CONTENT_TYPE
from kvkeep.serve.page import page_routes
from kvkeep.serve.places import Places, waited_too_long
from kvkeep.serve.replies import Reply, as_json, refusal
from kvkeep.serve.requests import Asked, RequestError, read
from kvkeep.serve.turns import Turns

_JSON_PER_BYTE = 4  # bytes of a request per byte of its prompt: characters may be escaped
_JSON_BESIDE = 2**16  # bytes of a request besides the prompt
_OPERATOR = "metrics"  # the name of keys that may read the figures of all tenants
_CLIENT_CLOSED = 499  # status for a client that disconnected; it is only logged

_Endpoint = Callable[[Request], Awaitable[Response]]
_Result = TypeVar("_Result")


def application(
    engine: Engine,
    *,
    keys: Keys | None = None,
    share: bool = False,
    hosts: Collection[str] = (),
    origins: Collection[str] = (),
) -> Starlette:
    """The HTTP application for an engine. The engine is closed when the server shuts down.

    Args:
        keys: API keys; clients must send one as a bearer token to every endpoint but /health and
            the page. Cached prompt prefixes are shared among clients whose keys have the same name.
            With several names, /metrics is for keys of the name "metrics". None: no key is needed.
        share: without keys, share cached prompt prefixes among all clients.
        hosts: accepted host names, in addition to `localhost` and every numeric address; "*": all.
        origins: origins of web pages that may use the server, such as "https://chat.example"; "*":
            all.

    Raises:
        SpecError: a host or an origin is not valid.
    """
    hosts, origins = host_names(hosts), origin_names(origins)
    started = int(time.time())
    reading, places = Turns(), Places(engine.limits)
    reader = ThreadPoolExecutor(1, thread_name_prefix="kvkeep-read")

    async def health(request: Request) -> Response:
        return as_json({"status": "ok"})

    async def models(request: Request) -> Response:
        return as_json({"object": "list", "data": [replies.model(engine.name, started)]})

    async def model(request: Request) -> Response:
        _require_model(engine, request.path_params["name"])
        return as_json(replies.model(engine.name, started))

    def client_of(request: Request) -> _Client:
        if keys is None:
            return _Client("", "" if share else None)
        name = _require_key(request, keys)
        return _Client(name, name)

    def keyed(endpoint: _Endpoint) -> _Endpoint:
        async def checked(request: Request) -> Response:
            client_of(request)
            return await endpoint(request)

        return checked

    async def metrics(request: Request) -> Response:
        _require_operator(client_of(request), keys, share)
        return Response(engine.metrics.text(), media_type=CONTENT_TYPE)

    def completions(chat: bool) -> _Completions:
        return _Completions(engine, reading, reader, places, client_of, chat)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(engine.close)
        reader.shutdown(cancel_futures=True)

    middleware = [Middleware(Gate, hosts=hosts, origins=origins)]
    if origins:
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=origins,
                allow_methods=["GET", "POST"],
                allow_headers=["authorization", "content-type"],
            )
        )
    app = Starlette(
        routes=[
            *page_routes(),
            Route("/health", health),
            Route("/metrics", metrics),
            Route("/v1/models", keyed(models)),
            Route("/v1/models/{name:path}", keyed(model)),
            Route("/v1/chat/completions", completions(True), methods=["POST"]),
            Route("/v1/completions", completions(False), methods=["POST"]),
        ],
        middleware=middleware,
        exception_handlers={
            RequestError: _refuse,
            HTTPException: _no_endpoint,
            ClientDisconnect: _leave,
            Exception: _fail,
        },
        lifespan=lifespan,
    )
    app.state.reading = reading
    return app


class _Client(NamedTuple):
    """A client: the name of its queue, and the namespace whose prompt prefixes it shares (None:
    none)."""

    queue: str
    shares: str | None


class _Completions:
    """An endpoint, as an ASGI application. A request keeps its place until its answer is sent.

    Args:
        reading, reader: the queue for parsing and tokenising prompts, and the thread that does it.
            The thread gets one prompt at a time, so that a waiting prompt is freed with its
            request.
        places: bounds the requests.
        chat: chat completions (True) or plain completions.
    """

    def __init__(
        self,
        engine: Engine,
        reading: Turns,
        reader: ThreadPoolExecutor,
        places: Places,
        client_of: Callable[[Request], _Client],
        chat: bool,
    ) -> None:
        self._engine, self._reading, self._reader, self._places = engine, reading, reader, places
        self._client_of, self._chat = client_of, chat

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        outcome = "failed"
        try:
            outcome = await self._answered(Request(scope, receive), send)
        except RequestError as error:
            outcome = _outcome_of(error)
            raise
        except (ClientDisconnect, asyncio.CancelledError):
            outcome = "left"
            raise
        finally:
            self._engine.metrics.ended(outcome)

    async def _answered(self, request: Request, send: Send) -> str:
        """Answer a request; returns its outcome."""
        client = self._client_of(request)
        _require_json(request)
        limits = self._engine.limits
        with self._places.place(client.queue):
            limit = _JSON_PER_BYTE * self._engine.prompts.most_bytes + _JSON_BESIDE
            body = await _body(request, limit, limits.timeout_s)
            with _in_time(limits):
                asked, ids, deadline = await self._parsed(request, body, client.queue)
            del body
            answer = _Answer(asked)
            work = self._engine.submit(
                asked, ids, answer.emit, name=client.shares, queue=client.queue
            )
            del ids
            try:
                with _in_time(limits):
                    async with asyncio.timeout_at(deadline):
                        await _until_disconnect(request, answer.begun())
                return await answer.send(request, send)
            finally:
                self._engine.cancel(work)

    async def _parsed(
        self, request: Request, body: bytearray, queue: str
    ) -> tuple[Asked, Tensor, float]:
        """The request, the token ids of its prompt, and until when it may wait to begin, in the
        event loop's time. It may wait for others only so long in all; its own time to be read does
        not count."""

        def parsed() -> tuple[Asked, Tensor]:
            asked = read(body, chat=self._chat)
            _require_model(self._engine, asked.model)
            return asked.without_prompt(), self._engine.prompts.encode(asked)

        loop = asyncio.get_running_loop()
        with self._reading.place(queue) as place:
            deadline = loop.time() + self._engine.limits.wait_s
            await _until_disconnect(request, self._reading.wait(place, deadline))
            left = deadline - loop.time()
            running = self._reader.submit(parsed)
            # The turn ends when the thread is done, even if the client disconnects before.
            place.hand_over()
            running.add_done_callback(lambda _: _in_loop(loop, self._reading.done))
            asked, ids = await _until_disconnect(request, asyncio.wrap_future(running))
            return asked, ids, loop.time() + left


class _Answer:
    """A request that the engine is answering, with the events of its answer so far."""

    def __init__(self, asked: Asked) -> None:
        self._asked = asked
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._last: Event | None = None

    def emit(self, event: Event) -> None:
        """Add an event; may be called from any thread."""
        _in_loop(self._loop, lambda: self._events.put_nowait(event))

    async def begun(self) -> None:
        """Wait until the answer begins.

        Raises:
            RequestError: it never does.
        """
        event = await self._events.get()
        if isinstance(event, RequestError):
            raise event
        assert isinstance(event, Begun)

    async def send(self, request: Request, send: Send) -> str:
        """Send it to the client, whole or streamed; returns the request's outcome.

        Raises:
            ClientDisconnect: the client disconnected.
            RequestError: it failed before anything was sent.
        """
        if self._asked.stream:
            headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
            response = StreamingResponse(
                self._chunks(), headers=headers, media_type="text/event-stream"
            )
            await response(request.scope, request.receive, send)
            if isinstance(self._last, RequestError):
                return _outcome_of(self._last)
            return "left" if self._last is None else "answered"
        whole = await _until_disconnect(request, self._whole())
        await whole(request.scope, request.receive, send)
        return "answered"

    async def _events_to_last(self) -> AsyncIterator[Event]:
        while self._last is None:
            event = await self._events.get()
            if isinstance(event, Used | RequestError):
                self._last = event
            yield event

    async def _chunks(self) -> AsyncIterator[str]:
        reply = Reply(self._asked)
        for chunk in reply.begun():
            yield chunk
        async for event in self._events_to_last():
            for chunk in reply.chunks(event):
                yield chunk
            if isinstance(event, Pictured):
                event.got()

    async def _whole(self) -> Response:
        events = [event async for event in self._events_to_last()]
        if isinstance(events[-1], RequestError):
            raise events[-1]
        return as_json(Reply(self._asked).whole(events))


def _in_loop(loop: asyncio.AbstractEventLoop, do: Callable[[], None]) -> None:
    with suppress(RuntimeError):  # the loop has ended
        loop.call_soon_threadsafe(do)


@contextmanager
def _in_time(limits: Limits) -> Iterator[None]:
    """Refuse the request if this takes longer than it may wait."""
    try:
        yield
    except TimeoutError:
        raise waited_too_long(limits) from None


def _outcome_of(error: RequestError) -> str:
    """How a request that ended with an error is counted."""
    if error.status in (429, 503):
        return "unavailable"
    return "refused" if error.status < 500 else "failed"


async def _until_disconnect(request: Request, doing: Awaitable[_Result]) -> _Result:
    """The result of `doing`, which is cancelled if the client disconnects.

    Raises:
        ClientDisconnect: the client disconnected.
    """

    async def left() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.ensure_future(doing), asyncio.ensure_future(left())
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _body(request: Request, limit: int, timeout_s: float) -> bytearray:
    """Read a request's body, at most `limit` bytes.

    Raises:
        RequestError: the body is larger than the limit, or does not arrive in time.
    """
    body = bytearray()
    length = request.headers.get("content-length", "")
    too_large = length.isdecimal() and int(length) > limit
    try:
        async with asyncio.timeout(timeout_s), aclosing(request.stream()) as parts:
            while not too_large:
                part = await anext(parts, None)
                if part is None:
                    return body
                body += part
                too_large = len(body) > limit
    except TimeoutError:
        raise RequestError(
            f"the request did not arrive within {timeout_s:g} s; send it faster, or send less",
            status=408,
        ) from None
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


def _require_json(request: Request) -> None:
    """Refuse other content types: any web page can send those without a CORS preflight."""
    given = request.headers.get("content-type", "")
    if given.partition(";")[0].strip().lower() != "application/json":
        raise RequestError(
            f"the content type is {given[:80]!a}; send application/json",
            code="unsupported_content_type",
            status=415,
        )


def _require_key(request: Request, keys: Keys) -> str:
    """The name of the API key that was sent.

    Raises:
        RequestError: no key was sent, or a wrong one.
    """
    kind, _, given = request.headers.get("authorization", "").partition(" ")
    name = keys.name(given.strip().encode("latin-1")) if kind.lower() == "bearer" else None
    if name is None:
        said = "a wrong API key" if given else "no API key"
        raise RequestError(
            f"{said}; send one of this server's keys as `Authorization: Bearer KEY`",
            code="invalid_api_key",
            status=401,
        )
    return name


def _require_operator(client: _Client, keys: Keys | None, share: bool) -> None:
    """Refuse clients who would learn from the figures of all about others, with whom they share
    nothing.

    Raises:
        RequestError: this client may not read them.
    """
    alone = share if keys is None else keys.tenants == 1
    if not alone and client.queue != _OPERATOR:
        raise RequestError(
            "these figures are of all clients together, who share nothing here; use a key of the "
            f"name {_OPERATOR}",
            code="not_the_operator",
            status=403,
        )


async def _refuse(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return refusal(error)


async def _no_endpoint(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    phrase = HTTPStatus(error.status_code).phrase.lower()
    message = f"{request.method} {request.scope['path'][:200]}: {phrase}"
    return refusal(RequestError(message, status=error.status_code))


async def _leave(request: Request, error: Exception) -> Response:
    return Response(status_code=_CLIENT_CLOSED)


async def _fail(request: Request, error: Exception) -> Response:
    return refusal(RequestError("the server failed; its log says why", status=500))
