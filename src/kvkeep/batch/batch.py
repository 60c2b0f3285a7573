"""Batch: the scheduler of many sequences. Each step is one packed forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import count
from threading import RLock
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvkeep.batch.answer import LENGTH, STOP, Answer, Prompt, Settings
from kvkeep.cache import Snapshot
from kvkeep.errors import CapacityError, OutOfMemoryError, ShapeError, SpecError, UnsupportedError
from kvkeep.files.offload import Offload
from kvkeep.host import DEFAULT_SPEC, ModelCache, Piece, Specs, host_of
from kvkeep.store.prefix import PrefixStore


class NewToken(NamedTuple):
    """A token that a step added to an answer, and the text that it completes."""

    answer: Answer
    token: int
    text: str


class Batch:
    """Answers many prompts at once. They may come and go between steps; an answer does not depend
    on the others, up to rounding.

    A step is one forward of the next token of each answer that is being generated, and of chunks of
    the prompts that are being read. Each answer has a cache of its own, so specs may differ.

    Threads may add and cancel answers while one thread calls `step`.

    Args:
        model: attached, and of a library that can compute several sequences in one forward.
        tokenizer: turns prompts of text to token ids, and answers to text; None: prompts are token
            ids, and answers have no text.
        spec: what caches keep, unless `add` says otherwise.
        store: prefixes of prompts are looked up here, and what ended is stored; None: no store.
        namespace: of the store's entries.
        max_bytes: most bytes of slots that the answers at work may come to hold, by what their
            specs promise; None: no limit. Others wait.
        chunk: prompts are read in chunks of this many tokens, whoever else is there, because what a
            policy evicts depends on them. So a long prompt delays others by one chunk.
        step_tokens: most tokens of a step, but at least one of each answer that is being generated
            and one chunk.
        offload: where answers are put aside for others of higher priority; None: in host memory.

    Raises:
        UnsupportedError: the model cannot compute several sequences in one forward.
        SpecError: a number below 1.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        spec: Specs = DEFAULT_SPEC,
        store: PrefixStore | None = None,
        namespace: str = "",
        max_bytes: int | None = None,
        chunk: int = 256,
        step_tokens: int = 512,
        offload: Offload | None = None,
    ) -> None:
        self._model, self._host, self._tokenizer = model, host_of(model), tokenizer
        if reason := self._host.unpackable:
            raise UnsupportedError(
                f"{self._host.name} cannot compute several sequences in one forward: {reason}"
            )
        given = {"chunk": chunk, "step_tokens": step_tokens, "max_bytes": max_bytes}
        for name, value in given.items():
            if value is not None and value < 1:
                raise SpecError(f"{name} is {value}; give at least 1")
        self.spec, self.store, self.namespace = spec, store, namespace
        self.max_bytes, self.chunk, self.step_tokens = max_bytes, chunk, step_tokens
        self._offload = offload
        self._limit = max_bytes  # lowered when memory proves to be less
        self._geometries = self._host.geometries()
        self._orders = count()
        self._waiting: list[Answer] = []  # for admission, by rank
        self._running: list[Answer] = []  # in the order of admission
        self._ended: list[Answer] = []  # in the last step
        self._lock = RLock()  # held while the lists change, not during a forward

    # -- answers ----------------------------------------------------------------------------

    def add(
        self,
        prompt: str | Tensor | Sequence[int],
        settings: Settings | None = None,
        *,
        n: int = 1,
        spec: Specs | None = None,
    ) -> list[Answer]:
        """Add a prompt. Its answers begin with the next step that has room for them.

        Args:
            prompt: text, or token ids (n,).
            settings: how to continue it; None: the defaults.
            n: how many answers; they share the prompt's slots.
            spec: what their caches keep; None: the batch's.

        Returns:
            The n answers, in order.

        Raises:
            ShapeError: no token, n below 1, or the answer could exceed the model's context.
            CapacityError: an answer alone could exceed `max_bytes`, or its storage.
            SpecError: the spec does not fit the model.
        """
        settings, spec = settings or Settings(), self.spec if spec is None else spec
        ids = self._ids(prompt)
        longest = len(ids) + settings.max_new_tokens
        self._require_context(len(ids), longest, n)
        cache = self._host.new_cache(spec)
        limit = cache.token_limit()
        if limit is not None and longest - 1 > limit:  # the last token is never fed
            raise CapacityError(
                f"a prompt of {len(ids)} tokens and {settings.max_new_tokens} new ones, but the "
                f"spec's storage holds {limit}; ask for fewer, or use @growing"
            )
        shares = n > 1 and all(layer.policy.budget is None for layer in cache.layers)
        shared = cache.bytes_of(self._geometries, len(ids) - 1) if shares else 0
        own = cache.bytes_of(self._geometries, longest) - shared
        if self.max_bytes is not None and own + shared > self.max_bytes:
            raise CapacityError(
                f"an answer of up to {longest} tokens takes {own + shared} bytes, but this batch "
                f"may hold {self.max_bytes}; ask for fewer tokens, use a spec that keeps less, or "
                "raise max_bytes"
            )
        origin = Prompt(ids, n, shared)
        with self._lock:
            answers = [
                Answer(
                    origin,
                    index,
                    settings,
                    order=next(self._orders),
                    ends=self._host.end_tokens(),
                    tokenizer=self._tokenizer,
                    spec=spec,
                    own_bytes=own,
                    device=self._host.device,
                )
                for index in range(n)
            ]
            self._waiting += answers
        return answers

    def _ids(self, prompt: str | Tensor | Sequence[int]) -> Tensor:
        if isinstance(prompt, str):
            if self._tokenizer is None:
                raise ShapeError("a prompt of text, but the batch has no tokenizer; give token ids")
            prompt = self._tokenizer(prompt)["input_ids"]
        ids = torch.as_tensor(prompt).flatten().cpu()
        if not len(ids) or ids.is_floating_point():
            raise ShapeError(f"a prompt of {len(ids)} tokens of {ids.dtype}; give at least one id")
        known = self._host.embeddings
        if known is not None and not 0 <= int(ids.min()) <= int(ids.max()) < known:
            raise ShapeError(
                f"a prompt has token ids from {int(ids.min())} to {int(ids.max())}; the model's "
                f"vocabulary has 0 to {known - 1}"
            )
        return ids.to(torch.int64)

    def _require_context(self, prompt: int, longest: int, n: int) -> None:
        if n < 1:
            raise ShapeError(f"n is {n}; ask for at least 1 answer")
        context = self._host.context
        if context is not None and longest > context:
            raise ShapeError(
                f"a prompt of {prompt} tokens and {longest - prompt} new ones exceed the model's "
                f"context of {context}; shorten the prompt, or lower max_new_tokens"
            )

    @property
    def running(self) -> int:
        """Answers at work."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Answers that wait for room, those put aside among them."""
        return len(self._waiting)

    @property
    def promised_bytes(self) -> int:
        """Bytes of slots that the answers at work may come to hold."""
        return self._promised(self._running)

    @property
    def live_bytes(self) -> int:
        """Bytes of the slots in use; those that answers share count once for each."""
        with self._lock:
            return sum(answer.cache.live_bytes for answer in self._running if answer.cache)

    def __iter__(self) -> Iterator[Answer]:
        """Take steps until all answers ended, and yield each when it has."""
        while self._waiting or self._running:
            self.step()
            yield from self._ended

    # -- a step -----------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self) -> list[NewToken]:
        """Admit answers and take one step; [] if no prompt was completed and no token is due.

        Raises:
            OutOfMemoryError: there is no memory for a step of a single answer.
        """
        self._ended = []
        while True:
            with self._lock:
                self._leave()
                self._admit()
                planned = self._planned()
            if not planned:
                return []
            pieces = [
                Piece(answer.next_ids(tokens), answer.cache)
                for answer, tokens in planned
                if answer.cache is not None
            ]
            try:
                logits = self._host.forward_packed(pieces)
            except Exception as error:
                with self._lock:
                    if not self._recovered(planned, error):
                        raise
                continue
            with self._lock:
                return self._take(planned, logits)

    def _recovered(self, planned: Sequence[tuple[Answer, int]], error: Exception) -> bool:
        """Whether a step that raised an error can be taken again with fewer answers."""
        for answer, _ in planned:
            cache = answer.cache
            if cache is not None and len({layer.fed for layer in cache.layers}) > 1:
                answer.fail(error)  # it evicted tokens, so it cannot go back
        left = [answer for answer in self._running if not answer.ended]
        if not isinstance(error, OutOfMemoryError) or len(self._running) < 2:
            return False
        if len(left) == len(self._running):
            self._put_aside(max(left, key=lambda answer: answer.rank))
        self._limit = self._promised([answer for answer in self._running if not answer.ended])
        return True

    def _leave(self) -> None:
        """Free what ended, or was cancelled."""
        for answer in [x for x in (*self._running, *self._waiting) if x.ended]:
            (self._running if answer in self._running else self._waiting).remove(answer)
            self._ended.append(answer)
            self._drop_aside(answer)
            answer.origin.filled(answer.index)
            cache, answer.cache = answer.cache, None
            if self.store is not None and cache is not None and answer.reason in (STOP, LENGTH):
                ids = answer.ids[: cache.fed]
                self.store.learn(self._model, ids, cache, namespace=self.namespace)
        self._waiting.sort(key=lambda answer: answer.rank)

    def _promised(self, answers: Sequence[Answer]) -> int:
        prompts = {id(answer.origin): answer.origin for answer in answers}
        own = sum(answer.own_bytes for answer in answers)
        return own + sum(prompt.shared_bytes for prompt in prompts.values())

    def _fits(self, answers: Sequence[Answer]) -> bool:
        alone = len(answers) == 1  # `add` has compared it
        return alone or self._limit is None or self._promised(answers) <= self._limit

    def _admit(self) -> None:
        """Admit answers by rank, as long as what all promise fits. For an answer of higher
        priority, the youngest of the lowest priority is put aside."""
        while self._waiting:
            first = self._waiting[0]
            stay = list(self._running)
            while not self._fits([*stay, first]):
                youngest = max(stay, key=lambda answer: answer.rank, default=None)
                if youngest is None or youngest.settings.priority >= first.settings.priority:
                    return
                stay.remove(youngest)
            for answer in [x for x in self._running if x not in stay]:
                self._put_aside(answer)
            self._begin(first)
            self._waiting.remove(first)
            self._running.append(first)

    def _begin(self, answer: Answer) -> None:
        if answer.aside is not None:
            kinds, states, routed = answer.aside
            assert self._offload is not None
            cache = self._host.new_cache(answer.spec)
            layers = [
                state._replace(parts=_each(state.parts, self._offload.get)) for state in states
            ]
            cache.restore(Snapshot(kinds, layers, routed))
            answer.cache = cache
            self._drop_aside(answer)
            return
        answer.cache = self._new_cache(answer)

    def _new_cache(self, answer: Answer) -> ModelCache:
        ids = answer.prompt
        if self.store is not None and answer.origin.frozen is None:
            try:
                cache, answer.cached = self.store.find(
                    self._model,
                    ids[:-1],
                    prompt=ids,
                    spec=answer.spec,
                    namespace=self.namespace,
                )
                return cache
            except UnsupportedError:  # slots of this spec are not shared
                pass
        return self._host.new_cache(answer.spec)

    def _put_aside(self, answer: Answer) -> None:
        """Copy what an answer holds to host memory or a file, and let it wait."""
        cache = answer.cache
        assert cache is not None
        if self._offload is None:
            self._offload = Offload()
        if cache.fed:
            states = [
                state._replace(parts=_each(state.parts, self._offload.put))
                for state in cache.states("put aside")
            ]
            kinds = [layer.kind for layer in cache.layers]
            answer.aside = kinds, states, cache.routed
        answer.cache = None
        self._running.remove(answer)
        self._waiting.append(answer)
        self._waiting.sort(key=lambda answer: answer.rank)

    def _drop_aside(self, answer: Answer) -> None:
        if answer.aside is not None and self._offload is not None:
            for state in answer.aside[1]:
                _each(state.parts, self._offload.drop)
            answer.aside = None

    def _planned(self) -> list[tuple[Answer, int]]:
        """The answers of the next step, and how many tokens each is fed."""
        planned = [(answer, 1) for answer in self._running if answer.unfed == 1]
        generating, tokens = len(planned), len(planned)
        reading: set[int] = set()  # prompts that one answer reads for all
        for answer in sorted(self._running, key=lambda answer: answer.rank):
            origin, cache, left = answer.origin, answer.cache, answer.unfed
            if left == 1 or cache is None:
                continue
            if origin.frozen is not None and cache.fed < len(answer.prompt) - 1:
                answer.cache = cache = origin.frozen.fork()
                origin.filled(answer.index)
                left = 1
            elif answer.reads_for_all:
                if id(origin) in reading:
                    continue
                reading.add(id(origin))
                left -= 1  # the last token is each answer's own
            some = min(left, self.chunk - cache.fed % self.chunk)
            if tokens + some > self.step_tokens and len(planned) > generating:
                break
            planned.append((answer, some))
            tokens += some
        return planned

    def _take(self, planned: Sequence[tuple[Answer, int]], logits: Tensor) -> list[NewToken]:
        """Choose the next tokens of the answers that were fed all of theirs."""
        found = []
        for (answer, _), row in zip(planned, logits, strict=True):
            cache, origin = answer.cache, answer.origin
            assert cache is not None
            if cache.fed == len(origin.ids) - 1 and origin.frozen is None:
                origin.filled(answer.index)
                if origin.awaited:
                    origin.frozen = cache.freeze()
            if answer.unfed == 0 and not answer.ended:
                try:
                    found.append(NewToken(answer, *answer.choose(row)))
                except Exception as error:  # a processor's or the tokenizer's
                    answer.fail(error)
        self._leave()
        return found


def _each(parts: Any, change: Callable[[Any], Any]) -> Any:
    """Change every plane of a layer's state."""
    return {part: {name: change(planes[name]) for name in planes} for part, planes in parts.items()}
