"""Engine: one model that answers one request after the other, and the store it reads from."""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from kvkeep.errors import UnsupportedError
from kvkeep.hf.attach import attach, detach
from kvkeep.hf.cache import Cache
from kvkeep.hf.generate import follow
from kvkeep.hf.specs import Specs
from kvkeep.serve.requests import Asked, RequestError
from kvkeep.serve.stops import Stops
from kvkeep.store.prefix import PrefixStore
from kvkeep.store.stretch import require_keepable

_MOST_TOKENS = 4096  # of an answer that nothing else limits
_LOG = logging.getLogger("kvkeep.serve")


@dataclass(frozen=True)
class Piece:
    """Text that a choice goes on with."""

    index: int
    text: str


@dataclass(frozen=True)
class Finished:
    """A choice is whole; why: "stop" or "length"."""

    index: int
    reason: str


@dataclass(frozen=True)
class Used:
    """All choices are whole. Tokens of the prompt, of all answers, and those of the prompt that
    were found instead of computed."""

    prompt: int
    completion: int
    cached: int


Event = Piece | Finished | Used | RequestError
"""What an answer consists of; it ends with `Used`, or with an error."""


@final
class Engine:
    """Answers requests one at a time, in the order they came, in a thread of its own.

    Args:
        model, tokenizer: attached until `close`.
        name: what clients call the model.
        cache: what to keep.
        store: where the beginnings of prompts are found and kept; None computes everything.
        namespace: of the store's entries.

    Raises:
        SpecError, UnsupportedError: the cache or the model cannot work.
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
    ) -> None:
        self.model, self.tokenizer, self.name = model, tokenizer, name
        self.spec, self.namespace = cache, namespace
        attach(model, cache)
        held = Cache(model, cache)
        limits = (getattr(held.config, "max_position_embeddings", None), held.get_max_length())
        self.context: int | None = min((n for n in limits if n and n > 0), default=None)
        self.why_no_reuse = ""
        """Why no prompt begins with what others began with; empty if it does."""
        try:
            require_keepable(held)
        except UnsupportedError as error:
            self.why_no_reuse = str(error)
        self.store = None if self.why_no_reuse else store
        self._encoding = threading.Lock()  # a tokenizer is not for several threads at once
        self._closing = threading.Event()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="kvkeep-serve")

    def encode(self, asked: Asked) -> list[int]:
        """The token ids of a request's prompt.

        Raises:
            RequestError: the chat template or the tokenizer refuses it, or it is longer than the
                model's context.
        """
        if isinstance(asked.prompt, list):
            ids = asked.prompt
            known = int(self.model.get_input_embeddings().num_embeddings)
            if not all(0 <= token < known for token in ids):
                raise RequestError(
                    f"prompt has token ids outside of 0 to {known - 1}", param=asked.param
                )
        else:
            with self._encoding:
                ids = self._chat_ids(asked) if asked.chat else self._text_ids(asked)
        if not ids:
            raise RequestError(f"{asked.param}: no tokens; give some text", param=asked.param)
        if self.context is not None and len(ids) >= self.context:
            raise RequestError(
                f"this model's context is {self.context} tokens, but {asked.param} takes "
                f"{len(ids)}, and an answer at least 1; shorten it",
                param=asked.param,
                code="context_length_exceeded",
            )
        return ids

    def _text_ids(self, asked: Asked) -> list[int]:
        ids: list[int] = self.tokenizer(asked.prompt)["input_ids"]
        return ids

    def _chat_ids(self, asked: Asked) -> list[int]:
        if self.tokenizer.chat_template is None:
            raise RequestError(f"{self.name} has no chat template; use /v1/completions")
        template = self.tokenizer.get_chat_template(tools=asked.tools)
        calls = any("tool_calls" in message for message in asked.messages)
        for used, field in ((asked.tools, "tools"), (calls, "tool_calls")):
            if used and field not in template:  # it would leave them out without a word
                raise RequestError(
                    f"the chat template of {self.name} has no place for {field}", param=field
                )
        try:
            found = self.tokenizer.apply_chat_template(
                asked.messages, tools=asked.tools, add_generation_prompt=True, return_dict=True
            )
        except Exception as error:  # templates raise what they like, for the messages they refuse
            reason = " ".join(str(error).split())[:300]
            raise RequestError(
                f"the chat template of {self.name} cannot render these messages: {reason}",
                param=asked.param,
            ) from error
        ids: list[int] = found["input_ids"]
        return ids

    def submit(
        self,
        asked: Asked,
        ids: list[int],
        emit: Callable[[Event], None],
        gone: threading.Event,
    ) -> Future[None]:
        """Answer a request when those before it are answered.

        Args:
            ids: from `encode`.
            emit: given each event, the last of which is `Used` or an error; from other threads.
            gone: when it is set, the answer ends with the next token, or never begins.
        """
        future = self._worker.submit(self._run, asked, ids, emit, gone)
        future.add_done_callback(lambda done: emit(_stopped()) if done.cancelled() else None)
        return future

    def close(self) -> None:
        """Stop with the next token, and detach the model."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._worker.shutdown(cancel_futures=True)
        detach(self.model)

    def _run(
        self,
        asked: Asked,
        ids: list[int],
        emit: Callable[[Event], None],
        gone: threading.Event,
    ) -> None:
        def stopped() -> bool:
            return gone.is_set() or self._closing.is_set()

        try:
            self._answer(asked, torch.tensor(ids), emit, stopped)
            if stopped():
                emit(_stopped())
        except Exception:
            _LOG.exception("a request failed")
            emit(RequestError("the server failed; its log says why", status=500))

    def _answer(
        self,
        asked: Asked,
        ids: Tensor,
        emit: Callable[[Event], None],
        stopped: Callable[[], bool],
    ) -> None:
        room = _MOST_TOKENS if self.context is None else self.context - len(ids)
        most = room if asked.max_tokens is None else min(asked.max_tokens, room)
        # Of the generator that all requests share, none is to decide what another draws.
        seed = secrets.randbits(63) if asked.seed is None else asked.seed
        ends = _end_tokens(self.model)
        cached = completion = 0
        for index in range(asked.n):
            if stopped():
                return
            cache, found = self.prepare(ids)
            stops = Stops(asked.stop)

            def give(text: str, stops: Stops = stops, index: int = index) -> None:
                text = stops.push(text)
                if text and not stopped():
                    emit(Piece(index, text))

            def ended(stops: Stops = stops) -> bool:
                return stops.found or stopped()

            result = follow(
                self.model,
                self.tokenizer,
                ids[None].to(self.model.device),
                cache,
                max_new_tokens=most,
                temperature=asked.temperature,
                top_p=asked.top_p,
                seed=None if index else seed,
                on_text=give,
                stopped=ended,
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
            if self.store is not None:
                fed = result.ids[0, : cache.fed]
                self.store.learn(self.model, fed, cache, namespace=self.namespace)

    def prepare(self, ids: Tensor) -> tuple[Cache, int]:
        """A cache that holds all tokens of a prompt, int64 (n,), but the last, or nothing; and how
        many of them were found instead of computed."""
        if self.store is None:
            return Cache(self.model, self.spec), 0
        return self.store.read(
            self.model, ids[:-1], prompt=ids, spec=self.spec, namespace=self.namespace
        )


def _stopped() -> RequestError:
    return RequestError("the server is shutting down; ask again later", status=503)


def _end_tokens(model: Any) -> set[int]:
    ends = model.generation_config.eos_token_id
    return set(ends) if isinstance(ends, list) else {ends}
