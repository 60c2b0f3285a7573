"""The server's endpoints, as a Starlette application."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any, NamedTuple, TypeVar, final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from kvkeep.serve.engine import Engine, RequestState, failed
from kvkeep.serve.http.admission import Admission, in_thread
from kvkeep.serve.http.gate import Gate, host_names, origin_names
from kvkeep.serve.http.page import page_routes
from kvkeep.serve.kept import Kept
from kvkeep.serve.keys import Keys
from kvkeep.serve.metrics import CONTENT_TYPE
from kvkeep.serve.prompts.prompt import Asked, Encoded
from kvkeep.serve.refused import RequestError
from kvkeep.serve.replies.completion_replies import CompletionReply
from kvkeep.serve.replies.reply import Reply, as_json, model_object, refusal
from kvkeep.serve.replies.response_replies import ResponseReply
from kvkeep.serve.requests.bodies import read
from kvkeep.serve.requests.completions import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    Request,
    TokenizeRequest,
)
from kvkeep.serve.requests.responses import ResponsesRequest

_OPERATOR = "metrics"  # keys of this name may read the metrics of all tenants
_CLIENT_CLOSED = 499  # status of a request whose client disconnected; it is only logged

_Kind = ChatCompletionRequest | CompletionRequest | ResponsesRequest
_MakeReply = Callable[[Request, Encoded], Reply]
_Result = TypeVar("_Result")


def application(
    engine: Engine,
    *,
    keys: Keys | None = None,
    share: bool = False,
    hosts: Collection[str] = (),
    origins: Collection[str] = (),
) -> Starlette:
    """The HTTP application for an engine. It closes the engine when the server shuts down.

    Args:
        keys: API keys; clients must send one as a bearer token to every endpoint but /health and
            the page. Clients whose keys have the same name share cached prompt prefixes. With
            several names, only keys named "metrics" may read /metrics. None: no key is needed.
        share: without keys, share cached prompt prefixes among all clients.
        hosts: accepted host names, in addition to `localhost` and every numeric address; "*": all.
        origins: origins of web pages that may use the server, such as "https://chat.example"; "*":
            all.

    Raises:
        SpecError: a host or an origin is not valid.
    """
    hosts, origins = host_names(hosts), origin_names(origins)
    started = int(time.time())
    admission = Admission(engine.limits)

    def client_of(request: HTTPRequest) -> _Client:
        if keys is None:
            return _Client("", "" if share else None)
        name = _require_key(request, keys)
        return _Client(name, name)

    async def health(request: HTTPRequest) -> Response:
        return as_json({"status": "ok"})

    async def models(request: HTTPRequest) -> Response:
        client_of(request)
        return as_json({"object": "list", "data": [model_object(engine.name, started)]})

    async def model(request: HTTPRequest) -> Response:
        client_of(request)
        _require_model(engine, request.path_params["name"])
        return as_json(model_object(engine.name, started))

    async def metrics(request: HTTPRequest) -> Response:
        _require_operator(client_of(request), keys, share)
        return Response(engine.metrics.text(), media_type=CONTENT_TYPE)

    prompts, texts = engine.prompts, partial(_Texts, engine, admission, client_of)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(engine.close)

    kept = Kept(engine.limits.response_bytes)

    async def response(request: HTTPRequest) -> Response:
        name = request.path_params["id"]
        found = kept.drop if request.method == "DELETE" else kept.response
        return as_json(found(name, client_of(request).name))

    answers = partial(_Answers, engine, admission, client_of, kept)
    cors = Middleware(
        CORSMiddleware,
        allow_origins=origins,
        allow_methods=["DELETE", "GET", "POST"],
        allow_headers=["*"],  # OpenAI's client sends headers of its own
        expose_headers=["retry-after"],
    )
    app = Starlette(
        routes=[
            *page_routes(),
            Route("/health", health),
            Route("/metrics", metrics),
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", model),
            Route("/tokenize", texts(TokenizeRequest, prompts.tokenize).post, methods=["POST"]),
            Route(
                "/detokenize", texts(DetokenizeRequest, prompts.detokenize).post, methods=["POST"]
            ),
            Route("/v1/chat/completions", answers(ChatCompletionRequest), methods=["POST"]),
            Route("/v1/completions", answers(CompletionRequest), methods=["POST"]),
            Route("/v1/responses", answers(ResponsesRequest), methods=["POST"]),
            Route("/v1/responses/{id}", response, methods=["DELETE", "GET"]),
        ],
        middleware=[Middleware(Gate, hosts=hosts, origins=origins), cors],
        exception_handlers=dict.fromkeys(
            (RequestError, HTTPException, ClientDisconnect, Exception), _on_error
        ),
        lifespan=lifespan,
    )
    app.state.admission = admission
    return app


class _Client(NamedTuple):
    """A client: its key's name, by which requests take turns, and the namespace of the prompt
    prefixes that it may reuse (None: it reuses none)."""

    name: str
    namespace: str | None


@dataclass(frozen=True)
class _Posted:
    """Base of the endpoints that receive JSON by POST."""

    engine: Engine
    admission: Admission
    client_of: Callable[[HTTPRequest], _Client]

    @asynccontextmanager
    async def body(self, http: HTTPRequest) -> AsyncIterator[tuple[_Client, bytearray]]:
        """Yield a request's client and body; its place is held until the context exits."""
        client = self.client_of(http)
        _require_json(http)
        with self.admission.place(client.name):
            limit, timeout_s = self.engine.prompts.most_body, self.engine.limits.timeout_s
            yield client, await _body(http, limit, timeout_s)


@final
@dataclass(frozen=True)
class _Answers(_Posted):
    """An ASGI endpoint for one type of generation request."""

    kept: Kept
    kind: type[_Kind]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        outcome = "failed"
        try:
            outcome = await self._answer(HTTPRequest(scope, receive), send)
        except RequestError as error:
            outcome = error.outcome
            if self.kind is ResponsesRequest:
                raise error.renamed(ResponsesRequest.names) from None
            raise
        except (ClientDisconnect, asyncio.CancelledError):
            outcome = "left"
            raise
        finally:
            self.engine.metrics.ended(outcome)

    async def _answer(self, http: HTTPRequest, send: Send) -> str:
        """Answer a request; return its outcome after the response is sent."""
        async with self.body(http) as (client, body):
            reply, state = await _until_disconnect(http, self._started(body, client))
            try:
                response = await _response(http, reply)
                await response(http.scope, http.receive, send)
                return reply.outcome
            finally:
                self.engine.cancel(state)

    async def _started(self, body: bytearray, client: _Client) -> tuple[Reply, RequestState]:
        """Parse and submit a request, and wait until its first answer starts."""
        async with self.admission.patience() as waiting:
            reply, prompts = await self._parsed(body, client, waiting)
            state = self.engine.submit(
                prompts,
                reply.emit,
                n=reply.request.answers,
                show_cache=reply.request.stream_options.include_cache,
                namespace=client.namespace,
                queue=client.name,
            )
            try:
                await reply.started()
            except BaseException:
                self.engine.cancel(state)
                raise
            return reply, state

    async def _parsed(
        self, body: bytearray, client: _Client, waiting: asyncio.Timeout
    ) -> tuple[Reply, list[Asked]]:
        """Parse and tokenise a request; return its reply and prompts."""
        parsed, prompts = self.admission.parsed, self.engine.prompts
        async with self.admission.turn(client.name):
            chat, reply = await parsed(lambda: self._request(body, client), waiting)
            if isinstance(chat, ChatCompletionRequest) and chat.remote_images:
                await in_thread(lambda: prompts.fetch(chat))
            encoded = await parsed(lambda: prompts.encode(chat), waiting)
            return reply(chat.without_prompt(), encoded), encoded.prompts

    def _request(self, body: bytearray, client: _Client) -> tuple[Request, _MakeReply]:
        """Parse a body; return the chat or completion request and the constructor of its reply."""
        asked = read(body, self.kind)
        body.clear()
        _require_model(self.engine, asked.model)
        if not isinstance(asked, ResponsesRequest):
            return asked, CompletionReply
        keep = self.kept.following(asked, client.name)
        return asked.chat(), partial(ResponseReply, about=asked.about(), keep=keep)


@final
@dataclass(frozen=True)
class _Texts(_Posted):
    """The /tokenize or /detokenize endpoint, in vLLM's format."""

    kind: type[TokenizeRequest] | type[DetokenizeRequest]
    answer: Callable[[Any], dict[str, Any]]

    async def post(self, http: HTTPRequest) -> Response:
        def found(body: bytearray) -> dict[str, Any]:
            request = read(body, self.kind)
            if request.model is not None:
                _require_model(self.engine, request.model)
            return self.answer(request)

        async with (
            self.body(http) as (client, body),
            self.admission.patience() as waiting,
            self.admission.turn(client.name),
        ):
            return as_json(await self.admission.parsed(lambda: found(body), waiting))


async def _response(http: HTTPRequest, reply: Reply) -> Response:
    if not reply.request.stream:
        return as_json(await _until_disconnect(http, reply.whole()))
    headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
    return StreamingResponse(reply.chunks(), headers=headers, media_type="text/event-stream")


async def _until_disconnect(http: HTTPRequest, doing: Awaitable[_Result]) -> _Result:
    """Await `doing`, and cancel it if the client disconnects.

    Raises:
        ClientDisconnect: the client disconnected.
    """

    async def left() -> None:
        while (await http.receive())["type"] != "http.disconnect":
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


async def _body(http: HTTPRequest, limit: int, timeout_s: float) -> bytearray:
    """Read a request's body, at most `limit` bytes.

    Raises:
        RequestError: the body is larger than the limit, or does not arrive in time.
    """
    too_large = RequestError(
        f"the request is larger than {limit} bytes; send less", status=413, code="request_too_large"
    )
    body, length = bytearray(), http.headers.get("content-length", "")
    if length.isdecimal() and int(length) > limit:
        raise too_large
    try:
        async with asyncio.timeout(timeout_s):
            async for part in http.stream():
                body += part
                if len(body) > limit:
                    raise too_large
    except TimeoutError:
        late = f"the request did not arrive within {timeout_s:g} s; send it faster, or send less"
        raise RequestError(late, status=408) from None
    return body


def _require_model(engine: Engine, name: str) -> None:
    if name != engine.name:
        message = f"no model {name[:80]!a}; this server has {engine.name!r}"
        raise RequestError(message, "model", "model_not_found", 404)


def _require_json(request: HTTPRequest) -> None:
    """Require JSON: a web page can send other content types without a CORS preflight."""
    given = request.headers.get("content-type", "")
    if given.partition(";")[0].strip().lower() != "application/json":
        message = f"the content type is {given[:80]!a}; send application/json"
        raise RequestError(message, code="unsupported_content_type", status=415)


def _require_key(request: HTTPRequest, keys: Keys) -> str:
    """The name of the API key in the request.

    Raises:
        RequestError: the request has no key, or a wrong one.
    """
    kind, _, given = request.headers.get("authorization", "").partition(" ")
    name = keys.name(given.strip().encode("latin-1")) if kind.lower() == "bearer" else None
    if name is None:
        said = "a wrong API key" if given else "no API key"
        message = f"{said}; send one of this server's keys as `Authorization: Bearer KEY`"
        raise RequestError(message, code="invalid_api_key", status=401)
    return name


def _require_operator(client: _Client, keys: Keys | None, share: bool) -> None:
    """Refuse a client that must not see other clients' activity in /metrics.

    Raises:
        RequestError: this client may not read the metrics.
    """
    alone = share if keys is None else keys.tenants == 1
    if not alone and client.name != _OPERATOR:
        message = f"the metrics cover all clients; use a key named {_OPERATOR}"
        raise RequestError(message, code="not_the_operator", status=403)


async def _on_error(request: HTTPRequest, error: Exception) -> Response:
    if isinstance(error, ClientDisconnect):
        return Response(status_code=_CLIENT_CLOSED)
    if isinstance(error, HTTPException):
        phrase = HTTPStatus(error.status_code).phrase.lower()
        path = f"{request.method} {request.scope['path'][:200]}"
        error = RequestError(f"{path}: {phrase}", status=error.status_code)
    return refusal(error if isinstance(error, RequestError) else failed())
