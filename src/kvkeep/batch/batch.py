"""Batch: the scheduler of many sequences. Each step is one packed forward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import count
from threading import RLock
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvkeep.arguments import suggests
from kvkeep.batch.answer import LENGTH, STOP, Answer, Prompt, Settings
from kvkeep.batch.reuse import Reuse
from kvkeep.cache import Snapshot
from kvkeep.errors import (
    CapacityError,
    OutOfMemoryError,
    RollbackError,
    ShapeError,
    SpecError,
    StateError,
    UnsupportedError,
)
from kvkeep.files.offload import Kept, Offload
from kvkeep.geometry import Geometry
from kvkeep.host import DEFAULT_SPEC, ModelCache, Piece, Sampling, Specs, host_of
from kvkeep.host.compress import compresses
from kvkeep.host.keep_until import Marker
from kvkeep.host.keep_until import keep_until as spec_keeping
from kvkeep.policy import Share
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
    the prompts that are being read. Each answer has a cache of its own, so specs may differ. If the
    model cannot compute several sequences in one forward (`Host.unpackable`), a step has a forward
    for each; if its rotary embedding follows the length of a text, there is one answer at a time.

    Threads may add and cancel answers while one thread calls `step`.

    Args:
        model: attached; others are computed one by one.
        tokenizer: turns prompts of text to token ids, and answers to text; None: prompts are token
            ids, and answers have no text.
        spec: what caches keep, unless `add` says otherwise.
        store: prefixes of prompts are looked up here, and prompts and answers are stored; None: no
            store.
        sequences: most answers at work; None: no limit. Others wait.
        max_bytes: most bytes of slots that the answers at work may come to hold, by what their
            specs promise, and of recurrent states with their copies for the store; None: no limit.
        chunk: prompts are read in chunks of this many tokens, whoever else is there, because what a
            policy evicts depends on them. So a long prompt delays others by one chunk.
        step_tokens: most tokens of a step, but at least one of each answer that is being generated
            and one chunk.
        offload: where answers are put aside for others of higher priority; None: in host memory.
        on_end: called in `step` with each answer that ended, before its cache is freed.

    Raises:
        SpecError: a number below 1.
        UnsupportedError: `max_bytes` is given, but the model does not tell what its slots take; or
            the spec's policy is `kvzip`.
    """

    @suggests(Settings, Sampling)
    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        spec: Specs = DEFAULT_SPEC,
        store: PrefixStore | None = None,
        sequences: int | None = None,
        max_bytes: int | None = None,
        chunk: int = 256,
        step_tokens: int = 512,
        offload: Offload | None = None,
        on_end: Callable[[Answer], None] | None = None,
    ) -> None:
        self._model, self._host, self._tokenizer = model, host_of(model), tokenizer
        given = {"sequences": sequences, "max_bytes": max_bytes}
        for name, value in {**given, "chunk": chunk, "step_tokens": step_tokens}.items():
            if value is not None and value < 1:
                raise SpecError(f"{name} is {value}; give at least 1")
        self.spec = spec
        # Such a model's forwards may leave frequencies behind that the next text needs.
        self.sequences = 1 if self._host.changing_rotary else sequences
        self.max_bytes, self.chunk, self.step_tokens = max_bytes, chunk, step_tokens
        self._offload, self._on_end = offload, on_end
        # Both are lowered when memory proves to be less.
        self._limit, self._most = max_bytes, self.sequences
        self._new_cache(spec)  # raises if answers cannot have it
        self._geometries = self._known_geometries()
        specs = {} if self._geometries is None else self._host.recurrent_specs()
        self._state_bytes = sum(spec.nbytes for spec in specs.values())
        self._host_packs = not self._host.unpackable
        self._reuse = Reuse(model, store)
        self._orders, self._turns = count(), count(1)
        # The turns that each queue had last, of admission and of reading prompts.
        self._served: dict[str, int] = {}
        self._read: dict[str, int] = {}
        self._suspects: set[Answer] = set()  # their forward failed; each is taken alone
        self._waiting: list[Answer] = []  # for admission
        self._running: list[Answer] = []  # in the order of admission
        self._ended: list[Answer] = []  # in the last step
        self._lock = RLock()  # held while the lists change, not during a forward

    # -- answers ----------------------------------------------------------------------------

    @suggests(Settings, Sampling)
    def add(
        self,
        prompt: str | Tensor | Sequence[int],
        settings: Settings | None = None,
        *,
        n: int = 1,
        spec: Specs | None = None,
        keep_until: Marker | None = None,
        queue: str = "",
        namespace: str | None = "",
        reuse: Reuse | None = None,
    ) -> list[Answer]:
        """Add a prompt. Its answers begin with the next step that has room for them.

        Args:
            prompt: text, or token ids (n,).
            settings: how to continue it; None: the defaults.
            n: how many answers; they share the prompt's slots.
            spec: what their caches keep; None: the batch's.
            keep_until: they also keep the prompt up to this marker: see `kvkeep.keep_until`.
            queue: answers of the same priority are admitted from each queue in turn. The batch
                remembers each queue, so let them be few, such as the names of clients.
            namespace: only entries of the same namespace are found in the store; None: none is, and
                none is stored.
            reuse: what its caches begin with, and where they are kept; None: the batch's store.

        Returns:
            The n answers, in order.

        Raises:
            ShapeError: no token, n below 1, or the answer could exceed the model's context.
            CapacityError: an answer alone could exceed `max_bytes`, or its storage.
            SpecError: the spec does not fit the model, or cannot keep the prompt up to the marker.
        """
        settings, spec = settings or Settings(), self.spec if spec is None else spec
        ids = self._ids(prompt)
        if keep_until is not None:
            spec = spec_keeping(spec, ids, keep_until, self._tokenizer)
        longest = len(ids) + settings.max_new_tokens
        self._require_context(len(ids), longest, n)
        cache = self._new_cache(spec)
        limit = cache.token_limit()
        if limit is not None and longest - 1 > limit:  # the last token is never fed
            raise CapacityError(
                f"a prompt of {len(ids)} tokens and {settings.max_new_tokens} new ones, but the "
                f"spec's storage holds {limit}; ask for fewer, or use @growing"
            )
        shares = n > 1 and not any(layer.policy.evicts for layer in cache.layers)
        shared = self._bytes_of(cache, len(ids) - 1) if shares else 0
        origin = Prompt(ids, n, queue, namespace, reuse or self._reuse)
        # Of the states, one copy after each chunk of the prompt, and one at the end, until the
        # store has them; those of an answer's end are copied when the prompt's are gone.
        copies = len(ids) // self.chunk + 1 if origin.reuse.stores(origin) else 0
        origin.shared_bytes = shared + copies * self._state_bytes
        own = self._bytes_of(cache, longest) - shared + self._state_bytes
        most = own + origin.shared_bytes
        if self.max_bytes is not None and most > self.max_bytes:
            raise CapacityError(
                f"an answer of up to {longest} tokens takes {most} bytes, but this batch may hold "
                f"{self.max_bytes}; ask for fewer tokens, use a spec that keeps less, or raise "
                "max_bytes"
            )
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

    def _new_cache(self, spec: Specs) -> ModelCache:
        cache = self._host.new_cache(spec)
        if compresses(cache):
            raise UnsupportedError(
                "kvzip reads a prompt twice, which a batch does not; use another policy, or "
                "generate() for one prompt"
            )
        return cache

    def _known_geometries(self) -> list[Geometry] | None:
        try:
            return self._host.geometries()
        except UnsupportedError as error:
            if self.max_bytes is None:
                return None
            raise UnsupportedError(
                f"max_bytes is {self.max_bytes}, but it is not known what answers of "
                f"{self._host.name} take: {error}; leave it out, and limit sequences"
            ) from error

    def _bytes_of(self, cache: ModelCache, tokens: int) -> int:
        """The most bytes that a cache takes until that many tokens have been fed."""
        if self._geometries is None:
            return 0
        if any(layer.policy.share is not None for layer in cache.layers):
            tokens = Share.fullest(tokens)
        return cache.bytes_of(self._geometries, tokens)

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

        If the forward of several answers fails, each is taken alone, and one that fails again ends
        with that error. For want of memory, the youngest is put aside instead.
        """
        self._ended, found = [], []
        while True:
            with self._lock:
                self._leave()
                self._admit()
                groups = self._groups(self._planned())
            failed = False
            for group in groups:
                if any(answer.ended for answer, _ in group):  # cancelled since it was planned
                    failed = True
                    continue
                before = [answer.cache.fed if answer.cache else 0 for answer, _ in group]
                try:
                    logits = self._forward(group)
                except (KeyboardInterrupt, SystemExit):
                    raise
                except BaseException as error:
                    failed = True
                    with self._lock:
                        self._recover(group, before, error)
                    if isinstance(error, OutOfMemoryError):
                        break  # others may have been put aside
                else:
                    with self._lock:
                        found += self._take(group, logits)
            if found or not failed:
                return found

    def _groups(self, planned: Sequence[_Planned]) -> list[list[_Planned]]:
        """Divide a step into forwards: one of all that can be packed, and one each of the rest."""
        together, groups = [], []
        for one in planned:
            cache = one.answer.cache
            assert cache is not None
            if self._host_packs and cache.activation is None and one.answer not in self._suspects:
                together.append(one)
            else:
                groups.append([one])
        return [together, *groups] if together else groups

    def _forward(self, group: Sequence[_Planned]) -> Tensor:
        """Feed each answer its next tokens; returns logits (answers, V). If it fails, the caches
        return to what they held, unless they evicted tokens."""
        pieces = [
            Piece(answer.next_ids(tokens), answer.cache)
            for answer, tokens in group
            if answer.cache is not None
        ]
        ids, cache = pieces[0]
        if self._host_packs and cache.activation is None:
            return self._host.forward_packed(pieces)
        before = cache.fed
        try:
            logits = self._host.forward(ids[None].to(self._host.device), cache)[0, -1:]
        except BaseException:
            with suppress(RollbackError, StateError):
                cache.rewind(before)
            raise
        answer = group[0].answer
        if cache.fed % self.chunk == 0 and cache.fed < len(answer.prompt):
            answer.origin.reuse.mark(answer)
        return logits

    def _recover(
        self, group: Sequence[_Planned], before: Sequence[int], error: BaseException
    ) -> None:
        """After a forward failed: end what cannot go back or failed alone, put an answer aside for
        want of memory, or suspect each. `before` is what each cache had been fed."""
        stuck = False
        for (answer, _), fed in zip(group, before, strict=True):
            cache = answer.cache
            if cache is not None and {layer.fed for layer in cache.layers} != {fed}:
                answer.fail(error)  # it evicted tokens, so it cannot go back
                stuck = True
        left = [answer for answer in self._running if not answer.ended]
        if isinstance(error, OutOfMemoryError) and len(self._running) > 1:
            if left and not stuck:
                self._put_aside(max(left, key=lambda answer: answer.rank))
            going = [answer for answer in self._running if not answer.ended]
            self._limit, self._most = self._promised(going), max(1, len(going))
        elif len(group) == 1:
            group[0].answer.fail(error)
        else:
            self._suspects |= {answer for answer, _ in group}

    def _leave(self) -> None:
        """Free what ended, or was cancelled."""
        for answer in [x for x in (*self._running, *self._waiting) if x.ended]:
            (self._running if answer in self._running else self._waiting).remove(answer)
            self._ended.append(answer)
            self._suspects.discard(answer)
            self._drop_aside(answer)
            answer.origin.filled(answer.index)
            if answer.reason in (STOP, LENGTH):
                answer.origin.reuse.keep(answer)
            if self._on_end is not None:
                self._on_end(answer)
            answer.cache = None

    def _promised(self, answers: Sequence[Answer]) -> int:
        prompts = {id(answer.origin): answer.origin for answer in answers}
        own = sum(answer.own_bytes for answer in answers)
        return own + sum(prompt.shared_bytes for prompt in prompts.values())

    def _fits(self, answers: Sequence[Answer]) -> bool:
        if len(answers) == 1:  # `add` has compared its bytes
            return True
        if self._most is not None and len(answers) > self._most:
            return False
        return self._limit is None or self._promised(answers) <= self._limit

    def _admit(self) -> None:
        """Admit answers as long as what all promise fits: those of the highest priority first, of
        each queue in turn. For an answer of higher priority, the youngest of the lowest priority is
        put aside."""
        if not self._running:
            self._limit, self._most = self.max_bytes, self.sequences
        while self._waiting:
            first = min(self._waiting, key=self._turn_of)
            stay = list(self._running)
            while not self._fits([*stay, first]):
                youngest = max(stay, key=lambda answer: answer.rank, default=None)
                if youngest is None or youngest.settings.priority >= first.settings.priority:
                    return
                stay.remove(youngest)
            for answer in [x for x in self._running if x not in stay]:
                self._put_aside(answer)
            self._served[first.origin.queue] = next(self._turns)
            self._waiting.remove(first)
            self._running.append(first)
            try:
                self._begin(first)
            except Exception as error:
                first.cache = None
                alone = len(self._running) == 1
                if alone or not isinstance(error, OutOfMemoryError):
                    first.fail(error)
                else:  # what it holds stays aside
                    self._running.remove(first)
                    self._waiting.append(first)
                    self._limit = self._promised(self._running)
                    self._most = len(self._running)
                return

    def _turn_of(self, answer: Answer) -> tuple[int, int, int]:
        """Sorts waiting answers: by priority, then the queue that was served longest ago."""
        served = self._served.get(answer.origin.queue, 0)
        return -answer.settings.priority, served, answer.order

    def _begin(self, answer: Answer) -> None:
        answer.cache = cache = self._host.new_cache(answer.spec)
        if answer.aside is not None:
            aside, cache.activation = answer.aside
            assert self._offload is not None
            get = self._offload.get
            layers = [state._replace(parts=_each(state.parts, get)) for state in aside.layers]
            carried = aside.recurrent and {name: get(x) for name, x in aside.recurrent.items()}
            cache.restore(aside._replace(layers=layers, recurrent=carried))
            self._drop_aside(answer)

    def _put_aside(self, answer: Answer) -> None:
        """Copy what an answer holds to host memory or a file, and let it wait. If there is no room
        for it, the answer ends with that error."""
        cache = answer.cache
        assert cache is not None
        if self._offload is None:
            self._offload = Offload()
        if cache.fed:
            put: list[Kept] = []

            def keep(plane: Tensor) -> Kept:
                assert self._offload is not None
                put.append(self._offload.put(plane))
                return put[-1]

            try:
                states = [
                    state._replace(parts=_each(state.parts, keep))
                    for state in cache.states("put aside")
                ]
                own = None if cache.recurrent is None else cache.recurrent.tensors()
                carried: Any = own and {name: keep(x) for name, x in own.items()}
            except Exception as error:
                for one in put:
                    self._offload.drop(one)
                answer.fail(error)
                self._leave()
                return
            kinds = [layer.kind for layer in cache.layers]
            answer.aside = Snapshot(kinds, states, cache.routed, carried), cache.activation
        else:
            answer.begun = False
        answer.cache = None
        self._running.remove(answer)
        self._waiting.append(answer)

    def _drop_aside(self, answer: Answer) -> None:
        if answer.aside is not None and self._offload is not None:
            for state in answer.aside[0].layers:
                _each(state.parts, self._offload.drop)
            for kept in (answer.aside[0].recurrent or {}).values():
                self._offload.drop(kept)
            answer.aside = None

    def _planned(self) -> list[_Planned]:
        """The answers of the next step, and how many tokens each is fed."""
        ready = [answer for answer in self._running if answer.begun and answer.unfed == 1]
        planned = [_Planned(answer, 1) for answer in ready]
        generating, tokens = len(planned), len(planned)
        reading: set[int] = set()  # prompts that one answer reads for all
        for answer in self._in_turn([x for x in self._running if x not in ready]):
            origin = answer.origin
            if origin.frozen is not None and answer.reads_prompt:
                try:
                    answer.cache, answer.begun = origin.frozen.fork(), True
                except Exception as error:
                    answer.fail(error)
                    continue
                origin.filled(answer.index)
            elif id(origin) in reading:
                continue
            # The store is asked as late as possible: what others read may be there by then.
            if tokens + self._chunk_of(answer) > self.step_tokens and len(planned) > generating:
                continue
            if not answer.begun:
                try:
                    answer.cache, answer.begun = origin.reuse.begin(answer), True
                except Exception as error:
                    answer.fail(error)
                    continue
                self._share(answer)
            if answer.reads_for_all:
                reading.add(id(origin))
            some = self._chunk_of(answer)
            self._read[origin.queue] = next(self._turns)
            planned.append(_Planned(answer, some))
            tokens += some
        return planned

    def _share(self, answer: Answer) -> None:
        """Freeze what an answer read for all of its prompt's, once it is complete."""
        cache, origin = answer.cache, answer.origin
        assert cache is not None
        if origin.frozen is None and 0 < cache.fed == len(origin.ids) - 1:
            origin.filled(answer.index)
            if origin.awaited:
                with suppress(OutOfMemoryError):  # each answer then reads the prompt itself
                    origin.frozen = cache.freeze()

    def _in_turn(self, answers: Sequence[Answer]) -> list[Answer]:
        """Answers by priority, then the first of each queue, the second of each, and so on; of
        queues, that which was read longest ago first."""
        of_queue, keys = Counter[str](), dict[Answer, tuple[int, int, int]]()
        for answer in answers:
            queue = answer.origin.queue
            read = self._read.get(queue, 0)
            keys[answer] = -answer.settings.priority, of_queue[queue], read
            of_queue[queue] += 1
        return sorted(keys, key=keys.__getitem__)

    def _chunk_of(self, answer: Answer) -> int:
        """How many of its tokens an answer is fed next."""
        cache = answer.cache
        assert cache is not None
        # The last token of a prompt that one reads for all is each answer's own.
        borders = [answer.unfed - answer.reads_for_all, self.chunk - cache.fed % self.chunk]
        if cache.activation is not None and cache.activation.start > cache.fed:
            borders.append(cache.activation.start - cache.fed)  # the adapter's forwards are its own
        return min(borders)

    def _take(self, group: Sequence[_Planned], logits: Tensor) -> list[NewToken]:
        """Choose the next tokens of the answers that were fed all of theirs."""
        found = []
        for (answer, _), row in zip(group, logits, strict=True):
            origin = answer.origin
            self._suspects.discard(answer)
            if not answer.tokens and not answer.reads_prompt and origin.frozen is None:
                origin.reuse.keep(answer)  # now: others find it while this one goes on
            self._share(answer)
            if answer.unfed == 0 and not answer.ended:
                try:
                    found.append(NewToken(answer, *answer.choose(row)))
                except (KeyboardInterrupt, SystemExit):
                    raise
                except BaseException as error:  # a processor's or the tokenizer's
                    answer.fail(error)
        self._leave()
        return found


class _Planned(NamedTuple):
    """An answer, and how many of its tokens a step feeds."""

    answer: Answer
    tokens: int


def _each(parts: Any, change: Callable[[Any], Any]) -> Any:
    """Change every plane of a layer's state."""
    return {part: {name: change(planes[name]) for name in planes} for part, planes in parts.items()}
