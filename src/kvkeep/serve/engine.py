"""Engine: one model that answers the requests of all clients together, token by token."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any, final

from torch import Tensor

from kvkeep.batch import Answer, Batch, NewToken, Sampling, Settings
from kvkeep.batch.answer import Prompt
from kvkeep.errors import CapacityError, UnsupportedError
from kvkeep.host import ModelCache, Specs, host_of
from kvkeep.host.progress import Progress, silent
from kvkeep.host.sampling import bias, penalty
from kvkeep.serve.events import (
    Begun,
    Event,
    Finished,
    Named,
    Pictured,
    Piece,
    TokenLogprobs,
    Used,
)
from kvkeep.serve.limits import Limits
from kvkeep.serve.metrics import Metrics
from kvkeep.serve.pictures import Maker, Outline, Pictures
from kvkeep.serve.prompts import Prompts
from kvkeep.serve.requests import Asked, RequestError
from kvkeep.store.beginning import exact_specs
from kvkeep.store.identity import identity_of, keys_of, require_steady
from kvkeep.store.layer_slices import require_keepable
from kvkeep.store.prefix import PrefixStore

_LOG = logging.getLogger("kvkeep.serve")
_LEAST_LOGPROB = -9999.0  # OpenAI's for what is impossible; JSON has no infinity
_SAMPLED_S = 0.25  # how old the figure of the bytes in caches may be


@final
class Work:
    """A request that an engine answers, or that waits for it."""

    def __init__(
        self,
        asked: Asked,
        ids: Tensor,
        emit: Callable[[Event], None],
        queue: str,
        namespace: str | None,
    ) -> None:
        self.asked, self.ids, self.emit = asked, ids, emit
        self.queue, self.namespace = queue, namespace
        self.answers: list[Answer] = []
        self.begun = False
        self.pictures: Pictures | None = None
        self._picture: Future[Pictured | None] | None = None  # the newest
        self._gone = threading.Event()
        self._since = time.monotonic()
        self._last: dict[int, float] = {}  # when each answer had its last token
        self._given = [0] * asked.n  # characters of each answer that were passed on
        self._finished: set[int] = set()

    def cancel(self) -> None:
        """End it: what it holds is freed before the next step. May be called from any thread, and
        again."""
        self._gone.set()
        for answer in self.answers:
            answer.cancel()

    def start(self, answers: list[Answer]) -> None:
        """Take the answers of a batch to it."""
        self.answers = answers
        if self._gone.is_set():
            self.cancel()

    @property
    def gone(self) -> bool:
        """Whether nobody waits for it any more."""
        return self._gone.is_set()

    def begin(self, metrics: Metrics) -> None:
        """Say that it waits no longer, once one of its answers is at work."""
        if not self.begun and any(_at_work(a) for a in self.answers):
            self.begun = True
            metrics.prompt_tokens.inc(len(self.ids))
            self.emit(Begun())

    def add(self, new: NewToken, metrics: Metrics, text_of: Callable[[int], str]) -> None:
        """Pass on a token of one of its answers."""
        now, index = time.monotonic(), new.answer.index
        if not self._last:
            metrics.first_token.observe(now - self._since)
        if index in self._last:
            metrics.between_tokens.observe(now - self._last[index])
        self._last[index] = now
        metrics.generated_tokens.inc()
        logprobs = self._logprobs(new, text_of)
        if new.text or logprobs is not None:
            self.emit(Piece(index, new.text, logprobs))
        self._given[index] += len(new.text)

    def show(self, *, last: bool = False) -> None:
        """Pass on a picture of its answer's cache when it is made, if the client wants them and one
        is due. `last`: the answer has ended."""
        if self.pictures is not None and self.begun and not self.gone:
            picture = self.pictures.look(self.answers[0], last=last)
            if picture is not None:
                self._picture = picture
                picture.add_done_callback(self._shown)

    def _shown(self, picture: Future[Pictured | None]) -> None:
        made = None if picture.cancelled() else picture.result()
        if made is not None:
            self.emit(made)

    def _logprobs(self, new: NewToken, text_of: Callable[[int], str]) -> TokenLogprobs | None:
        answer = new.answer
        if not answer.logprobs:
            return None
        top = answer.top_logprobs[-1] if answer.top_logprobs else ()
        chosen, *likeliest = (
            Named(text_of(token), max(logprob, _LEAST_LOGPROB))
            for token, logprob in ((new.token, answer.logprobs[-1]), *top)
        )
        return TokenLogprobs(chosen, tuple(likeliest), self._given[answer.index])

    def finish(self, metrics: Metrics) -> bool:
        """Pass on which answers ended; returns whether all have, or one failed."""
        if not self.begun:
            return False
        for answer in self.answers:
            if not answer.ended or answer.index in self._finished:
                continue
            self._finished.add(answer.index)
            if answer.error is not None:
                _LOG.error("a request failed", exc_info=answer.error)
                self.emit(failed())
                self.cancel()
                return True
            self.emit(Finished(answer.index, answer.reason))
        if len(self._finished) < self.asked.n:
            return False
        cached = max(answer.cached for answer in self.answers)
        metrics.found_tokens.inc(cached)
        used = Used(len(self.ids), sum(len(a.tokens) for a in self.answers), cached)
        picture, self._picture = self._picture, None
        if picture is None:
            self.emit(used)
        else:
            picture.add_done_callback(lambda _: self.emit(used))
        return True


@final
class Engine:
    """Answers requests in one thread, which steps a `Batch` while there are any and sleeps
    otherwise.

    Args:
        model, tokenizer: the model is attached until `close`.
        name: the model's name for clients.
        cache: what to keep.
        store: holds prefixes of prompts for reuse; None: every prompt is computed.
        namespace: of the store's entries; a request's own namespace is appended to it.
        limits: of each request, and of all together.
        compile: run steps of one token of each answer in graphs, which are compiled here.
        progress: told how much of that is done.

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
        compile: bool | None = None,
        progress: Progress = silent,
    ) -> None:
        self.model, self.tokenizer, self.name = model, tokenizer, name
        self.spec, self.namespace, self.limits = cache, namespace, limits or Limits()
        self._host = host_of(model)
        self._host.attach(cache, compile=compile)
        if compile:
            try:
                self._host.warm(cache, self.limits.sequences, progress)
            except BaseException:
                self._host.detach()
                raise
        held = self._host.new_cache(cache)
        lengths = self._host.context, held.token_limit()
        context = min((n for n in lengths if n), default=None)
        self.prompts = Prompts(self._host, tokenizer, name, context, self.limits)
        self.why_no_reuse = ""
        """Why no prompt reuses the prefixes of others; empty if they do."""
        try:
            require_keepable(self._host.new_cache(exact_specs(held.specs)))
            require_steady(self._host)
            if store is not None:
                self._host.fingerprint(glance=True)  # entries are found by it
        except UnsupportedError as error:
            self.why_no_reuse = str(error)
        self.store = None if self.why_no_reuse else store
        self._maker = Maker()
        self._works: dict[Work, None] = {}  # in the batch, in the order of arrival
        self._by_prompt: dict[Prompt, Work] = {}  # the same, while the batch steps
        self.batch = self._new_batch()
        self.metrics = self._watched()
        self._new: list[Work] = []  # not in the batch yet
        self._sampled = 0.0
        self._wake = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="kvkeep-serve", daemon=True)
        self._thread.start()

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
        work = self._by_prompt.get(answer.origin)
        if work is not None and not work.gone:
            work.begin(self.metrics)
            work.show(last=True)

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
        """Requests none of whose answers is at work yet."""
        return sum(not (work.begun or work.gone) for work in [*self._new, *self._works])

    def submit(
        self,
        asked: Asked,
        ids: Tensor,
        emit: Callable[[Event], None],
        *,
        name: str | None = "",
        queue: str = "",
    ) -> Work:
        """Answer a request as soon as there is room for it.

        Args:
            ids: from `prompts.encode`.
            emit: called with each event from another thread; the last is `Used` or an error. It is
                not called for a request that was cancelled.
            name: the namespace whose stored prompts it may reuse; None: it reuses and stores none.
            queue: answers to requests of each queue begin in turn.

        Raises:
            RequestError: the engine is closed.
        """
        namespace = None if name is None else "/".join(filter(None, (self.namespace, name)))
        work = Work(asked, ids, emit, queue, namespace)
        if asked.include_cache:
            work.pictures = self._pictures(namespace)
        with self._wake:
            if self._closing:
                raise stopped()
            self._new.append(work)
            self._wake.notify()
        return work

    def cancel(self, work: Work) -> None:
        """End a request whose client is gone; what it holds is freed before the next step."""
        work.cancel()
        with self._wake:
            if work in self._new:
                self._new.remove(work)

    def close(self) -> None:
        """End all answers after the current step, detach the model, and wait until the store's
        backend has what was stored."""
        with self._wake:
            first, self._closing = not self._closing, True
            self._wake.notify()
        self._thread.join()
        self._maker.close()
        if first:
            self._host.detach()
            if self.store is not None:
                self.store.flush()

    # -- in the engine's thread -------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._wake:
                while not (self._new or self._busy or self._closing):
                    self._wake.wait()
                if self._closing:
                    break
                self._works |= dict.fromkeys(new := self._new)
                self._new = []
            try:
                self._start(new)
                self._step()
            except BaseException:  # of kvkeep's own: those of one answer end that answer
                _LOG.exception("all requests failed")
                self._drop(self._works, failed)
                self.batch = self._new_batch()
        self._drop([*self._works, *self._new], stopped)

    @property
    def _busy(self) -> bool:
        """Whether a step has something to do or to free."""
        return bool(self._works or self.batch.running or self.batch.waiting)

    def _start(self, works: Iterable[Work]) -> None:
        for work in works:
            try:
                work.start(self._added(work))
            except CapacityError:
                self._refuse(work, too_large())
            except Exception:
                _LOG.exception("a request failed")
                self._refuse(work, failed())

    def _refuse(self, work: Work, error: RequestError) -> None:
        del self._works[work]
        work.emit(error)

    def _added(self, work: Work) -> list[Answer]:
        asked, ids = work.asked, work.ids
        processors = []
        if asked.presence_penalty or asked.frequency_penalty:
            processors.append(
                penalty(
                    len(ids), presence=asked.presence_penalty, frequency=asked.frequency_penalty
                )
            )
        if asked.logit_bias:
            processors.append(bias(asked.logit_bias))
        sampling = Sampling(
            asked.temperature, asked.top_k, asked.top_p, asked.min_p, asked.seed, processors
        )
        settings = Settings(
            self.prompts.most_of(asked, len(ids)),
            sampling,
            asked.stop,
            logprobs=asked.logprobs,
            top_logprobs=asked.top_logprobs,
        )
        return self.batch.add(ids, settings, n=asked.n, queue=work.queue, namespace=work.namespace)

    def _step(self) -> None:
        self._by_prompt = {work.answers[0].origin: work for work in self._works}
        found: dict[Work, list[NewToken]] = {work: [] for work in self._works}
        for new in self.batch.step():
            found[self._by_prompt[new.answer.origin]].append(new)
        self._by_prompt.clear()
        for work, tokens in found.items():
            try:
                ended = work.gone or self._told(work, tokens)
            except Exception:  # such as of the tokenizer
                _LOG.exception("a request failed")
                work.emit(failed())
                ended = True
            if ended:
                work.cancel()  # once more: it may have been cancelled while it got its answers
                del self._works[work]
        self._show()
        now = time.monotonic()
        if now - self._sampled > _SAMPLED_S or not self.batch.running:
            self._sampled = now
            self.metrics.cache_bytes.set(self.batch.live_bytes)

    def _told(self, work: Work, tokens: Iterable[NewToken]) -> bool:
        """Tell a request's client what a step has found; returns whether that is all."""
        work.begin(self.metrics)
        for new in tokens:
            work.add(new, self.metrics, self._text_of)
        return work.finish(self.metrics)

    def _show(self) -> None:
        """Take a picture for those who want one, the least recently shown first."""
        if self._maker.free(last=False):
            looked = {work: work.pictures.looked for work in self._works if work.pictures}
            for work in sorted(looked, key=looked.__getitem__):
                work.show()

    def _text_of(self, token: int) -> str:
        text: str = self.tokenizer.decode([token])
        return text

    def _drop(self, works: Iterable[Work], why: Callable[[], RequestError]) -> None:
        for work in list(works):
            if not work.gone:
                work.emit(why())
            work.cancel()
        self._works.clear()
        self._by_prompt.clear()


def _at_work(answer: Answer) -> bool:
    """Whether it was; one that was put aside in its first step has tokens, but no cache."""
    return answer.cache is not None or bool(answer.tokens) or answer.ended


def stopped() -> RequestError:
    """Why a request is not answered when the server stops."""
    return RequestError("the server is shutting down; ask again later", status=503)


def too_large() -> RequestError:
    """Why a request is refused that could not be answered though it were alone."""
    return RequestError(
        "the answer could take more memory than this server has for all answers; ask for fewer "
        "tokens (max_tokens), or shorten the prompt",
        param="max_tokens",
    )


def failed() -> RequestError:
    """Why a request is not answered after an error that is not its own."""
    return RequestError("the server failed; its log says why", status=500)
