"""Engine: one model that answers one request at a time, and the store that it reuses."""

from __future__ import annotations

import json
import logging
import secrets
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, final

import torch
from torch import Tensor

from kvkeep.batch.stops import Stops
from kvkeep.errors import UnsupportedError
from kvkeep.host import GenerationOptions, ModelCache, Specs, host_of
from kvkeep.serve.limits import Limits
from kvkeep.serve.requests import Asked, RequestError
from kvkeep.store.identity import require_steady
from kvkeep.store.layer_slices import require_keepable
from kvkeep.store.prefix import PrefixStore

_LOG = logging.getLogger("kvkeep.serve")


@dataclass(frozen=True)
class Piece:
    """The next piece of a choice's text."""

    index: int
    text: str


@dataclass(frozen=True)
class Finished:
    """A choice is complete; `reason` is "stop" or "length"."""

    index: int
    reason: str


@dataclass(frozen=True)
class Used:
    """All choices are complete. Counts of tokens: of the prompt, of all answers, and of the prompt
    those that were found in the store instead of computed."""

    prompt: int
    completion: int
    cached: int


Event = Piece | Finished | Used | RequestError
"""The events of an answer; the last is `Used` or an error."""


@final
class Engine:
    """Answers requests one at a time, in the order of arrival, in a thread of its own.

    Args:
        model, tokenizer: the model is attached until `close`.
        name: the model's name for clients.
        cache: what to keep.
        store: holds prefixes of prompts for reuse; None: every prompt is computed.
        namespace: of the store's entries; a request's own namespace is appended to it.
        limits: of each request.

    Raises:
        SpecError, UnsupportedError: the spec does not fit the model, or the model cannot be
            attached.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        name: str,
        cache: Specs = "keep_all",
        store: PrefixStore | None = None,
        namespace: str = "",
        limits: Limits | None = None,
    ) -> None:
        self.model, self.tokenizer, self.name = model, tokenizer, name
        self.spec, self.namespace, self.limits = cache, namespace, limits or Limits()
        self._host = host_of(model)
        self._host.attach(cache, linears=True)
        held = self._host.new_cache(cache)
        lengths = self._host.context, held.token_limit()
        self.context: int | None = min((n for n in lengths if n), default=None)
        self.prompt_bytes = self.limits.prompt_of(self.context)
        self.why_no_reuse = ""
        """Why no prompt reuses the prefixes of others; empty if they do."""
        try:
            require_keepable(held)
            require_steady(self._host)
            if store is not None:
                self._host.fingerprint(glance=True)  # entries are found by it
        except UnsupportedError as error:
            self.why_no_reuse = str(error)
        self.store = None if self.why_no_reuse else store
        self._encoding = threading.Lock()  # tokenizers are not safe for several threads at once
        self._closing = threading.Event()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="kvkeep-serve")

    def encode(self, asked: Asked) -> Tensor:
        """The token ids of a request's prompt, int64 (n,).

        Raises:
            RequestError: the chat template or the tokenizer refuses it, it is longer than the
                model's context, or its answers could be longer than the limit.
        """
        if isinstance(asked.prompt, list):
            ids = asked.prompt
            self._require_context(asked, len(ids))
            known = self._host.embeddings
            if known is not None and not all(0 <= token < known for token in ids):
                raise RequestError(
                    f"prompt has token ids outside of 0 to {known - 1}", param=asked.param
                )
        else:
            with self._encoding:
                ids = self._chat_ids(asked) if asked.chat else self._text_ids(asked.prompt, asked)
            self._require_context(asked, len(ids))
        if not ids:
            raise RequestError(f"{asked.param}: no tokens; give some text", param=asked.param)
        self._most_of(asked, len(ids))
        return torch.tensor(ids)

    def _require_context(self, asked: Asked, length: int) -> None:
        if self.context is not None and length >= self.context:
            raise RequestError(
                f"this model's context is {self.context} tokens, but {asked.param} takes "
                f"{length}, and an answer at least 1; shorten it",
                param=asked.param,
                code="context_length_exceeded",
            )

    def _most_of(self, asked: Asked, length: int) -> int:
        """The most tokens that each answer to a prompt of `length` tokens may have.

        Raises:
            RequestError: all answers together could exceed the limit.
        """
        limit = self.limits.answer_tokens
        most = max(1, limit // asked.n) if asked.max_tokens is None else asked.max_tokens
        if self.context is not None:
            most = min(most, self.context - length)
        if asked.n * most > limit:
            raise RequestError(
                f"{asked.n} answers of up to {most} tokens are {asked.n * most} tokens, but this "
                f"server gives {limit} to a request; ask for fewer (max_tokens, n)",
                param="n" if asked.n > 1 else "max_tokens",
            )
        return most

    def _text_ids(self, text: str, asked: Asked, **options: Any) -> list[int]:
        if len(text) > self.prompt_bytes or len(text.encode()) > self.prompt_bytes:
            raise self._too_large(asked)
        ids: list[int] = self.tokenizer(text, **options)["input_ids"]
        return ids

    def _chat_ids(self, asked: Asked) -> list[int]:
        if self.tokenizer.chat_template is None:
            raise RequestError(f"{self.name} has no chat template; use /v1/completions")
        template = self.tokenizer.get_chat_template(tools=asked.tools)
        calls = any("tool_calls" in message for message in asked.messages)
        for used, field in ((asked.tools, "tools"), (calls, "tool_calls")):
            if used and field not in template:  # it would silently leave them out
                raise RequestError(
                    f"the chat template of {self.name} does not render {field}", param=field
                )
        try:
            if _is_larger([asked.messages, asked.tools], self.prompt_bytes):
                raise self._too_large(asked)
            text: str = self.tokenizer.apply_chat_template(
                asked.messages, tools=asked.tools, add_generation_prompt=True, tokenize=False
            )
            return self._text_ids(text, asked, add_special_tokens=False)
        except RequestError:
            raise
        except Exception as error:  # templates are programs, and raise errors of any class
            reason = " ".join(str(error).split())[:300]
            raise RequestError(
                f"the chat template of {self.name} cannot render these messages: {reason}",
                param=asked.param,
            ) from error

    def _too_large(self, asked: Asked) -> RequestError:
        return RequestError(
            f"{asked.param} takes more than the {self.prompt_bytes} bytes that this server reads "
            "of a prompt; shorten it",
            param=asked.param,
            code="context_length_exceeded",
        )

    def submit(
        self,
        asked: Asked,
        ids: Tensor,
        emit: Callable[[Event], None],
        gone: threading.Event,
        *,
        name: str | None = "",
    ) -> Future[None]:
        """Answer a request after those that were submitted before it.

        Args:
            ids: from `encode`.
            emit: called with each event from another thread; the last is `Used` or an error.
            gone: set it to end the answer with the next token, or before it begins.
            name: the namespace whose stored prompts it may reuse; None: it reuses and stores none.

        Raises:
            RequestError: the engine is closed.
        """
        try:
            future = self._worker.submit(self._run, asked, ids, emit, gone, name)
        except RuntimeError:  # the engine was closed
            raise _stopped() from None
        future.add_done_callback(lambda done: emit(_stopped()) if done.cancelled() else None)
        return future

    def close(self) -> None:
        """End the answer in progress with its next token, and detach the model."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._worker.shutdown(cancel_futures=True)
        self._host.detach()

    def _run(
        self,
        asked: Asked,
        ids: Tensor,
        emit: Callable[[Event], None],
        gone: threading.Event,
        name: str | None,
    ) -> None:
        def stopped() -> bool:
            return gone.is_set() or self._closing.is_set()

        try:
            self._answer(asked, ids, emit, stopped, name)
            if stopped():
                emit(_stopped())
        except BaseException:  # a panic of a Rust tokenizer is no Exception
            _LOG.exception("a request failed")
            emit(RequestError("the server failed; its log says why", status=500))

    def _answer(
        self,
        asked: Asked,
        ids: Tensor,
        emit: Callable[[Event], None],
        stopped: Callable[[], bool],
        name: str | None,
    ) -> None:
        most = self._most_of(asked, len(ids))
        store, namespace = self._store_of(asked, name)
        # All requests share one generator: a seed of its own keeps each independent of the others.
        seed = secrets.randbits(63) if asked.seed is None else asked.seed
        ends = self._host.end_tokens()
        cached = completion = 0
        for index in range(asked.n):
            if stopped():
                return
            cache, found, store = self._prepare(ids, store, namespace)
            stops = Stops(asked.stop)

            def give(text: str, stops: Stops = stops, index: int = index) -> None:
                text = stops.push(text)
                if text and not stopped():
                    emit(Piece(index, text))

            def ended(stops: Stops = stops) -> bool:
                return stops.found or stopped()

            result = self._host.generate(
                self.tokenizer,
                ids[None].to(self._host.device),
                cache,
                GenerationOptions(
                    most,
                    asked.temperature,
                    asked.top_p,
                    seed=None if index else seed,
                    on_text=give,
                    stopped=ended,
                ),
            )
            cached += 0 if index else found
            completion += result.tokens
            whole = result.tokens < most or int(result.ids[0, -1]) in ends
            if not stopped():
                if rest := stops.rest():
                    emit(Piece(index, rest))
                emit(Finished(index, "stop" if stops.found or whole else "length"))
                if index == asked.n - 1:
                    emit(Used(len(ids), completion, cached))
            if store is not None:
                fed = result.ids[0, : cache.fed]
                store.learn(self.model, fed, cache, namespace=namespace)

    def _store_of(self, asked: Asked, name: str | None) -> tuple[PrefixStore | None, str]:
        """The store in which a request's prompt is looked up and kept, and the namespace."""
        if self.store is None or name is not None:
            return self.store, "/".join(filter(None, (self.namespace, name)))
        # Its answers share the prompt through a store that lives as long as the request.
        return (PrefixStore(self.store.budget) if asked.n > 1 else None), ""

    def _prepare(
        self, ids: Tensor, store: PrefixStore | None, namespace: str
    ) -> tuple[ModelCache, int, PrefixStore | None]:
        """Prepare to answer a prompt, int64 (n,).

        Returns:
            A cache that holds all tokens of the prompt but the last, or an empty one; how many of
            them were found instead of computed; and the store, or None if this prompt cannot use
            it.
        """
        if store is not None:
            try:
                cache, found = store.read(
                    self.model, ids[:-1], prompt=ids, spec=self.spec, namespace=namespace
                )
                return cache, found, store
            except UnsupportedError as error:
                _LOG.warning("a prompt is computed without the store: %s", error)
        return self._host.new_cache(self.spec), 0, None


def _stopped() -> RequestError:
    return RequestError("the server is shutting down; ask again later", status=503)


def _is_larger(given: Any, limit: int) -> bool:
    """Whether a template that writes its input as indented JSON would write more than `limit`
    bytes. Deeply nested input becomes long by indentation, so it is counted without writing it."""
    pieces = json.JSONEncoder(indent=4, ensure_ascii=False).iterencode(given)
    return any(total > limit for total in accumulate(len(piece.encode()) for piece in pieces))
