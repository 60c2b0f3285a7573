"""Engine: one model that answers the requests of all clients in a batch, token by token."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, final

from kvkeep.errors import CapacityError, UnsupportedError
from kvkeep.generate import Answer, Batch, NewToken, WithMedia
from kvkeep.generate.answer import Likely, Prompt
from kvkeep.generate.drafting import require_draftable
from kvkeep.host import ModelCache, Specs, host_of
from kvkeep.host.progress import Progress, silent
from kvkeep.serve.events import Event, Picture, Scored, Started, TextDelta, TokenLogprob, Usage
from kvkeep.serve.limits import Limits
from kvkeep.serve.metrics import Metrics
from kvkeep.serve.pictures import Maker, Outline, Pictures
from kvkeep.serve.prompts.prompt import Asked, Echo, Prompts
from kvkeep.serve.refused import RequestError
from kvkeep.serve.token_names import TokenNames
from kvkeep.store.beginning import exact_specs
from kvkeep.store.identity import identity_of, keys_of, require_steady
from kvkeep.store.layer_slices import require_storable, why_not_keepable
from kvkeep.store.prefix import PrefixStore

_LOG = logging.getLogger("kvkeep.serve")
_LEAST_LOGPROB = -9999.0  # OpenAI's value for a probability of 0; JSON has no infinity
_SAMPLED_S = 0.25  # seconds after which the byte counts of caches are measured again


@final
class RequestState:
    """A request that the engine answers or queues.

    Args:
        add: adds one prompt to a batch.
        emit: called with each event.
        pictures: cache pictures of the request's only answer; None: the client wants none.
    """

    def __init__(
        self,
        prompts: Sequence[Asked],
        add: Callable[[Batch, Asked], list[Answer]],
        emit: Callable[[Event], None],
        metrics: Metrics,
        pictures: Pictures | None = None,
    ) -> None:
        self.prompts, self.add, self.emit, self.pictures = prompts, add, emit, pictures
        self.answers: list[Answer] = []
        self._index: dict[Answer, int] = {}
        self.started = self.gone = False  # gone: cancelled
        self._metrics = metrics
        self._picture: Future[Picture | None] | None = None  # the newest picture
        self._arrived = time.monotonic()
        self._last: dict[Answer, float] = {}  # the time of each answer's last token
        self._passed: Counter[Answer] = Counter()  # tokens of each answer that were passed on
        self._finished: set[Answer] = set()

    def cancel(self) -> None:
        """End the request and free its memory before the next step. Thread-safe and repeatable."""
        self.gone = True
        for answer in self.answers:
            answer.cancel()

    def enter(self, batch: Batch) -> None:
        """Add the request's prompts to a batch."""
        for prompt in self.prompts:
            self.answers += self.add(batch, prompt)
        self._index = {answer: index for index, answer in enumerate(self.answers)}
        if self.gone:
            self.cancel()

    def advance(self, tokens: Iterable[NewToken], names: TokenNames) -> bool:
        """Emit the results of a step; return whether all answers ended or one failed."""
        self.start()
        for new in tokens:
            self._pass_on(new, names)
        return self.started and self._finish()

    def start(self) -> None:
        """Emit `Started` when the first answer starts."""
        if not self.started and any(map(_at_work, self.answers)):
            self.started = True
            self._metrics.prompt_tokens.inc(self._prompt_tokens)
            self.emit(Started())

    def show(self, *, last: bool = False) -> None:
        """If the client wants pictures and one is due, take one of the answer's cache and emit it
        when it is made. `last`: the answer has ended."""
        if self.pictures is not None and self.started and not self.gone:
            picture = self.pictures.look(self.answers[0], last=last)
            if picture is not None:
                self._picture = picture
                picture.add_done_callback(self._shown)

    def _shown(self, picture: Future[Picture | None]) -> None:
        made = None if picture.cancelled() else picture.result()
        if made is not None:
            self.emit(made)

    @property
    def _prompt_tokens(self) -> int:
        return sum(len(prompt.ids) for prompt in self.prompts)

    def _pass_on(self, new: NewToken, names: TokenNames) -> None:
        now, answer = time.monotonic(), new.answer
        if not self._last:
            self._metrics.first_token.observe(now - self._arrived)
        if answer in self._last:
            self._metrics.between_tokens.observe(now - self._last[answer])
        index, echo = self._index[answer], self._echo_of(answer)
        if echo is not None and answer not in self._last:
            logprobs: list[Scored] = []
            if answer.params.prompt_logprobs:
                scores: list[_Score] = [(None, []), *answer.origin.scores]
                each = zip(echo.tokens, scores, echo.offsets, strict=True)
                logprobs = [_scored(names, *one) for one in each]
            self.emit(TextDelta(index, echo.text, tuple(logprobs), echo=True))
        self._last[answer] = now
        self._metrics.generated_tokens.inc()
        at, self._passed[answer] = self._passed[answer], self._passed[answer] + 1
        if echo is not None and echo.only:
            return
        scored: tuple[Scored, ...] = ()
        if answer.logprobs:
            top = answer.top_logprobs[at] if answer.top_logprobs else []
            offset = answer.text_offsets[at] + (0 if echo is None else len(echo.text))
            scored = (_scored(names, new.token, (answer.logprobs[at], top), offset),)
        self.emit(TextDelta(index, new.text, scored))

    def _echo_of(self, answer: Answer) -> Echo | None:
        return self.prompts[self._index[answer] // answer.origin.answers].echo

    def _finish(self) -> bool:
        """Emit which answers ended; return whether all ended or one failed."""
        for answer in self.answers:
            if not answer.ended or answer in self._finished:
                continue
            self._finished.add(answer)
            if isinstance(answer.error, RequestError):
                self.emit(answer.error)
            elif isinstance(answer.error, UnsupportedError):  # e.g. images with some policies
                self.emit(RequestError(str(answer.error)))
                return True
            elif answer.error is not None:
                _LOG.error("a request failed", exc_info=answer.error)
                self.emit(failed())
                return True
            self.emit(TextDelta(self._index[answer], "", (), answer.reason))
        if len(self._finished) < len(self.answers):
            return False
        found = {answer.origin: 0 for answer in self.answers}
        for answer in self.answers:
            found[answer.origin] = max(found[answer.origin], answer.cached)
        cached = sum(found.values())
        self._metrics.found_tokens.inc(cached)
        told = (0 if _is_only(self._echo_of(x)) else len(x.tokens) for x in self.answers)
        usage = Usage(self._prompt_tokens, sum(told), cached)
        if self._picture is None:
            self.emit(usage)
        else:
            self._picture.add_done_callback(lambda _: self.emit(usage))
        return True


def _is_only(echo: Echo | None) -> bool:
    return echo is not None and echo.only


_Score = tuple[float | None, list[Likely]]


def _scored(names: TokenNames, token: int, score: _Score, offset: int) -> Scored:
    """A token's log-probability in the API's form."""
    logprob, likeliest = score
    chosen, *top = (
        TokenLogprob(names[one], None if logprob is None else max(logprob, _LEAST_LOGPROB))
        for one, logprob in ((token, logprob), *likeliest)
    )
    return Scored(chosen, tuple(top), offset)


@final
class Engine:
    """Answers requests in one thread, which steps a `Batch` while there are requests and sleeps
    otherwise.

    Args:
        model: the model; attached until `close`.
        tokenizer: the model's tokenizer, or its processor if clients may send images.
        name: the model's name for clients.
        cache: spec of the answers' caches.
        store: store of prompt prefixes; None: every prompt is computed.
        namespace: namespace of the store's entries; a request's own namespace is appended to it.
        limits: limits of each request, and of all requests together.
        compile: compile the steps that generate one token of each answer; see `warm`.

    Raises:
        SpecError, UnsupportedError: the spec does not fit the model, the model cannot be attached,
            or drafts cannot be removed from its caches.
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
        compile: bool | None = None,
    ) -> None:
        processor = tokenizer if hasattr(tokenizer, "image_processor") else None
        tokenizer = tokenizer if processor is None else tokenizer.tokenizer
        self.model, self.tokenizer, self.name = model, tokenizer, name
        self.spec, self.namespace, self.limits = cache, namespace, limits or Limits()
        self._host = host_of(model)
        self._host.attach(cache, compile=compile)
        held = self._host.new_cache(cache)
        try:
            if self.limits.drafts:
                require_draftable(self._host, held)
        except BaseException:
            self._host.detach()
            raise
        lengths = self._host.context, held.token_limit()
        context = min((n for n in lengths if n), default=None)
        self.prompts = Prompts(self._host, tokenizer, processor, name, context, self.limits)
        self.why_no_reuse = ""
        """The reason why prompts reuse no stored prefixes; empty if they do."""
        try:
            require_storable(self._host.new_cache(exact_specs(held.specs)), why_not_keepable)
            require_steady(self._host)
            if store is not None:
                self._host.fingerprint(glance=True)  # store entries are keyed by it
        except UnsupportedError as error:
            self.why_no_reuse = str(error)
        self.store = None if self.why_no_reuse else store
        self._maker, self._names = Maker(), TokenNames(tokenizer)
        self._states: dict[RequestState, None] = {}  # in order of arrival; other threads add to it
        self._by_prompt: dict[Prompt, RequestState] = {}  # filled during a batch's step
        self.batch = self._new_batch()
        self.metrics = self._watched()
        self._sampled = 0.0
        self._wake, self._closing = threading.Event(), False
        self._adding = threading.Lock()  # held while a request is added or the engine closes
        self._thread = threading.Thread(target=self._run, name="kvkeep-serve", daemon=True)
        self._thread.start()

    def warm(self, progress: Progress = silent) -> None:
        """Compile the steps before the first request; call it before requests are added."""
        self._host.warm(self.spec, self.limits.sequences, progress)

    def _new_batch(self) -> Batch:
        return Batch(
            self.model,
            self.tokenizer,
            spec=self.spec,
            store=self.store,
            sequences=self.limits.sequences,
            max_bytes=self.limits.cache_bytes,
            on_end=self._look,
        )

    def _look(self, answer: Answer) -> None:
        state = self._by_prompt.get(answer.origin)
        if state is not None and not state.gone:
            state.start()
            state.show(last=True)

    def _pictures(self, namespace: str | None) -> Pictures:
        store, outline = self.store, None
        if store is not None and namespace is not None:

            def outline(cache: ModelCache) -> Outline:
                activation = cache.activation
                identity = identity_of(self._host, cache.specs, namespace, activation)
                return lambda ids: store.outline_of(identity, keys_of(ids, activation))

        return Pictures(self.prompts.texts(), outline, self._maker)

    def _watched(self) -> Metrics:
        metrics = Metrics()
        metrics.watch("kvkeep_answers_running", "Answers at work.", lambda: self.batch.running)
        metrics.watch("kvkeep_requests_waiting", "Requests that wait.", lambda: self.waiting)
        if self.store is not None:
            store = self.store
            metrics.watch("kvkeep_store_bytes", "Memory of the store.", lambda: store.nbytes)
        return metrics

    @property
    def waiting(self) -> int:
        """Requests whose answers have not started."""
        return sum(not (state.started or state.gone) for state in list(self._states))

    def submit(
        self,
        prompts: Sequence[Asked],
        emit: Callable[[Event], None],
        *,
        n: int = 1,
        show_cache: bool = False,
        namespace: str | None = "",
        queue: str = "",
    ) -> RequestState:
        """Submit a request; its answers start as soon as there is room.

        Args:
            prompts: prompts from `prompts.encode`.
            emit: called with each event from another thread; the last event is `Usage` or an error.
                It is not called after the request was cancelled.
            n: answers to each prompt.
            show_cache: emit pictures of the cache of the only answer.
            namespace: namespace of the stored prompts that the request may reuse; None: it reuses
                and stores none.
            queue: queues take turns to start answers.

        Raises:
            RequestError: the engine is closed.
        """
        if namespace is not None:
            namespace = "/".join(filter(None, (self.namespace, namespace)))

        def add(batch: Batch, asked: Asked) -> list[Answer]:
            reuse = WithMedia(self.model, asked.media) if asked.media else None
            place: dict[str, Any] = {"queue": queue, "namespace": namespace}
            params = replace(asked.params, drafts=self.limits.drafts)
            return batch.add(asked.ids, params, n=n, reuse=reuse, **place)

        pictures = self._pictures(namespace) if show_cache else None
        state = RequestState(prompts, add, emit, self.metrics, pictures)
        with self._adding:
            if self._closing:
                raise stopped()
            self._states[state] = None
        self._wake.set()
        return state

    def cancel(self, state: RequestState) -> None:
        """Cancel a request; its memory is freed before the next step."""
        state.cancel()

    def close(self) -> None:
        """End all answers after the current step, detach the model, and wait until the store's
        backend has written everything."""
        with self._adding:
            first, self._closing = not self._closing, True
        self._wake.set()
        self._thread.join()
        self._maker.close()
        if first:
            self._host.detach()
            if self.store is not None:
                self.store.flush()

    # -- in the engine's thread -------------------------------------------------------------

    def _run(self) -> None:
        while not self._closing:
            try:
                self._step()
            except BaseException:  # a fault of kvkeep: an answer's own error ends only that answer
                _LOG.exception("all requests failed")
                self._drop([state for state in list(self._states) if state.answers], failed)
                self.batch = self._new_batch()
            if not (self._states or self.batch.running or self.batch.waiting):
                self._wake.wait()
            self._wake.clear()
        self._drop(list(self._states), stopped)

    def _enter(self, state: RequestState) -> None:
        try:
            state.enter(self.batch)
        except CapacityError:
            self._end(state, too_large())
        except Exception:
            _LOG.exception("a request failed")
            self._end(state, failed())

    def _end(self, state: RequestState, error: RequestError | None = None) -> None:
        if error is not None:
            state.emit(error)
        state.cancel()  # it may have been cancelled while its answers were added
        self._states.pop(state, None)

    def _step(self) -> None:
        states = list(self._states)
        for state in states:
            if not (state.answers or state.gone):
                self._enter(state)
        self._by_prompt = {answer.origin: state for state in states for answer in state.answers}
        found = defaultdict[RequestState, list[NewToken]](list)
        for new in self.batch.step():
            found[self._by_prompt[new.answer.origin]].append(new)
        self._by_prompt.clear()
        for state in states:
            try:
                if state.gone or state.advance(found[state], self._names):
                    self._end(state)
            except Exception:  # e.g. from the tokenizer
                _LOG.exception("a request failed")
                self._end(state, failed())
        self._show()
        now = time.monotonic()
        if now - self._sampled > _SAMPLED_S or not self.batch.running:
            self._sampled = now
            self.metrics.cache_bytes.set(self.batch.live_bytes)

    def _show(self) -> None:
        """Take the pictures that are due, the client with the oldest picture first."""
        if self._maker.free(last=False):
            looked = {
                state: state.pictures.looked for state in list(self._states) if state.pictures
            }
            for state in sorted(looked, key=looked.__getitem__):
                state.show()

    def _drop(self, states: Iterable[RequestState], why: Callable[[], RequestError]) -> None:
        """End requests with an error for their clients."""
        for state in states:
            self._end(state, None if state.gone else why())
        self._by_prompt.clear()


def _at_work(answer: Answer) -> bool:
    """Whether an answer has started; if preempted in its first step, it has tokens but no cache."""
    return answer.cache is not None or bool(answer.tokens) or answer.ended


def stopped() -> RequestError:
    """The error for requests that end because the server stops."""
    return RequestError("the server is shutting down; ask again later", status=503)


def too_large() -> RequestError:
    """The error for a request that exceeds the server's memory even alone."""
    why = "allows an answer more memory than this server has; lower it, or shorten the prompt"
    return RequestError.of("max_tokens", why)


def failed() -> RequestError:
    """The error for requests that end because another request failed."""
    return RequestError("the server failed; its log says why", status=500)
