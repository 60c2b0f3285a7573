"""Batch: the scheduler of many sequences. Each step is one packed forward."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from itertools import count
from threading import RLock
from typing import Any, NamedTuple, Unpack

import torch
from torch import Tensor

from kvkeep.arguments import suggests
from kvkeep.errors import OutOfMemoryError, SpecError, StateError
from kvkeep.files.offload import Offload
from kvkeep.generate.answer import LENGTH, STOP, Answer, Prompt, promised
from kvkeep.generate.intake import BatchLimits, Intake
from kvkeep.generate.preemption import Preemption
from kvkeep.generate.reuse import Reuse
from kvkeep.generate.sampling import SamplingParams
from kvkeep.generate.turns import Turns
from kvkeep.host import DEFAULT_SPEC, Marker, Specs, host_of
from kvkeep.host.keep_until import keep_until as spec_keeping
from kvkeep.store.prefix import PrefixStore
from kvkeep.threads import following_load

_FETCHES = 4  # prompts that a store fetches at once
_PATIENCE_S = 0.05  # seconds that a step with nothing to compute waits for stores
_INTERRUPTS = (KeyboardInterrupt, SystemExit)


class NewToken(NamedTuple):
    """A token that a step added to an answer, and the text that it completes. With drafts, a step
    may add several tokens to an answer, in order."""

    answer: Answer
    token: int
    text: str


class Batch:
    """Continuous batching: answers many prompts at once. Prompts may be added between steps. Up to
    rounding, an answer does not depend on other answers.

    A step is one forward of the next token of each answer that generates, with drafts if requested,
    and of chunks of the prompts that are being read. Each answer has its own cache, so specs may
    differ. If the model cannot compute several sequences in one forward (`Host.unpackable`), a step
    runs one forward per sequence. If the model's rotary embedding depends on the length of the
    text, one answer runs at a time.

    Threads may add and cancel answers while one thread calls `step`. An answer is admitted after
    its store's backend has replied; other answers do not wait for it.

    Args:
        model: the model; its sequences are packed only while it is attached.
        tokenizer: encodes text prompts and decodes answers; None: prompts are token ids, and
            answers have no text.
        spec: the default spec of the answers' caches.
        store: prefix store for prompts and answers; None: no store.
        sequences: most answers that run at once; further answers wait; None: no limit. With 1,
            steps are the model's own forwards.
        max_bytes: most bytes that running answers may hold, in slots (by their specs) and in
            recurrent states with their copies; None: no limit.
        chunk: tokens of a prompt that are read at once; a long prompt delays other answers by one
            chunk. It does not depend on the load, because evictions depend on it. None: the whole
            prompt; default: 256.
        step_tokens: most tokens of a step; a step always has one token and the drafts of each
            answer that generates, and one chunk; default: 512.
        offload: memory for the caches of preempted answers; it must hold nothing else. None: host
            memory.
        on_end: called in `step` with each ended answer before its cache is freed; after an
            interrupt, it may be called again.

    Raises:
        SpecError: a number below 1.
        UnsupportedError: `max_bytes` is given, but the size of the model's slots is not known; or
            the spec's policy is `kvzip`.
    """

    @suggests(SamplingParams, options=BatchLimits)
    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        spec: Specs = DEFAULT_SPEC,
        store: PrefixStore | None = None,
        offload: Offload | None = None,
        on_end: Callable[[Answer], None] | None = None,
        **limits: Unpack[BatchLimits],
    ) -> None:
        self._model, self._host, self._tokenizer = model, host_of(model), tokenizer
        for name, value in limits.items():
            if isinstance(value, int) and value < 1:
                raise SpecError(f"{name} is {value}; give at least 1")
        max_bytes, chunk = limits.get("max_bytes"), limits.get("chunk", 256)
        self.spec = spec
        # If a model's rotary frequencies change, a forward changes them for the next forward, too.
        self.sequences = 1 if self._host.changing_rotary else limits.get("sequences")
        self.max_bytes, self.step_tokens = max_bytes, limits.get("step_tokens", 512)
        self.chunk = sys.maxsize if chunk is None else chunk
        self._preemption, self._on_end = Preemption(offload), on_end
        # Lowered when memory runs out before these limits.
        self._limit, self._most = max_bytes, self.sequences
        self._intake = Intake(self._host, tokenizer, spec, max_bytes=max_bytes, chunk=self.chunk)
        self._packs = self.sequences != 1 and not self._host.unpackable
        self._reuse = Reuse(model, store)
        self._orders = count()
        self._admitted, self._read = Turns(), Turns()
        self._suspects: set[Answer] = set()  # their common forward failed; each now runs alone
        self._answers: list[Answer] = []  # in order of arrival; an answer with a cache runs
        # The last step's ended answers and new tokens, and whether it was interrupted.
        self._ended: list[Answer] = []
        self._found: dict[tuple[Answer, int], NewToken] = {}
        self._begun = _Begun()
        self._lock = RLock()  # held while the answers change, not during a forward

    # -- answers ----------------------------------------------------------------------------

    @suggests(SamplingParams)
    def add(
        self,
        prompt: str | Tensor | Sequence[int],
        params: SamplingParams | None = None,
        *,
        n: int = 1,
        spec: Specs | None = None,
        keep_until: Marker | None = None,
        queue: str = "",
        namespace: str | None = "",
        reuse: Reuse | None = None,
    ) -> list[Answer]:
        """Add a prompt. Its answers start in the next step that has room for them.

        Args:
            prompt: text, or token ids (n,).
            params: sampling parameters; None: the defaults.
            n: number of answers; they share the prompt's slots.
            spec: the spec of their caches; None: the batch's spec.
            keep_until: keep the prompt up to this marker in the caches: see `kvkeep.keep_until`.
            queue: among answers of one priority, queues are served in turn. The batch remembers
                every queue name, so use few, such as client names.
            namespace: the store's namespace to read from and write to; None: use no store.
            reuse: starts and stores the caches; None: use the batch's store.

        Returns:
            The n answers, in order.

        Raises:
            ShapeError: no token, n below 1, or the answer could exceed the model's context.
            CapacityError: one answer could exceed `max_bytes`, or its storage.
            SpecError: the spec does not fit the model, or cannot keep the prompt up to the marker.
            UnsupportedError: drafts cannot be removed from the answer's cache.
        """
        ids, spec = self._intake.ids(prompt), self.spec if spec is None else spec
        params = params or SamplingParams()
        if keep_until is not None:
            spec = spec_keeping(spec, ids, keep_until, self._tokenizer)
        origin = Prompt(
            ids,
            params,
            n,
            spec=spec,
            queue=queue,
            namespace=None if params.prompt_logprobs else namespace,
            reuse=reuse or self._reuse,
        )
        self._intake.check(origin)
        with self._lock:
            answers = [
                Answer(origin, index, order=order, host=self._host, tokenizer=self._tokenizer)
                for index, order in zip(range(n), self._orders, strict=False)
            ]
            self._answers += answers
        return answers

    @property
    def running(self) -> int:
        """The number of running answers."""
        return len(self._running())

    @property
    def waiting(self) -> int:
        """The number of answers that wait for room or for a store, including preempted ones."""
        with self._lock:
            return sum(answer.cache is None for answer in self._answers)

    @property
    def promised_bytes(self) -> int:
        """The most bytes of slots that running answers may hold."""
        return promised(self._running())

    @property
    def live_bytes(self) -> int:
        """Bytes of the slots in use; shared slots count once per answer."""
        with self._lock:
            return sum(answer.cache.live_bytes for answer in self._answers if answer.cache)

    def __iter__(self) -> Iterator[Answer]:
        """Run steps until all answers have ended, and yield each answer when it ends."""
        while self._answers or self._begun or self._ended:
            if self._begun or not self._ended:
                self.step()
            while self._ended:
                yield self._ended.pop(0)

    def flush(self) -> None:
        """Wait until the store's backend has received everything; steps do not wait for it."""
        self._reuse.flush()

    # -- a step -----------------------------------------------------------------------------

    def step(self) -> list[NewToken]:
        """Admit answers and run one step. Returns the new tokens; [] while prompts are being read.

        If the forward of several answers fails, it is repeated answer by answer, and an answer that
        fails alone ends with the error. If memory runs out, the youngest answer is preempted
        instead.

        After an interrupt (KeyboardInterrupt), call it again: each answer's part of the interrupted
        step is completed or undone, and the next step also returns the tokens of the interrupted
        one. An answer whose cache has evicted tokens cannot be undone, and ends with a StateError.
        """
        interrupted = bool(self._begun)
        if not interrupted:
            self._ended, self._found = [], {}
        with self._begun:
            with torch.inference_mode(), following_load() as adapt:
                adapt()
                if interrupted:
                    self._mend()
                self._advance()
            return list(self._found.values())

    def _advance(self) -> None:
        while True:
            with self._lock:
                self._finish()  # complete an interrupted step
                self._leave()
                if self._found:
                    return
                self._admit()
                groups = self._groups(self._planned())
            failed = False
            for group in groups:
                if any(answer.ended for answer, _ in group):  # cancelled since it was planned
                    failed = True
                    continue
                try:
                    logits = self._forward(group)
                except _INTERRUPTS:
                    raise
                except BaseException as error:
                    failed = True
                    with self._lock:
                        self._recover(group, error)
                    if isinstance(error, OutOfMemoryError):
                        break  # answers of the other groups may have been preempted
                else:
                    with self._lock:
                        for (answer, _), rows in zip(group, logits, strict=True):
                            answer.advance(rows)
                        self._finish()
                        self._leave()
            if not groups:
                self._await_stores()
            if self._found or not failed:
                return

    def _mend(self) -> None:
        """Undo the incomplete parts of an interrupted step. It may itself be interrupted."""
        with self._lock:
            for answer in self._running():
                if not answer.ended:
                    answer.undo(
                        StateError(
                            "a step of the batch was interrupted after it had changed this "
                            "answer's cache in a way that cannot be undone, such as an eviction; "
                            "add its prompt again"
                        ),
                    )
            self._preemption.retain(self._answers)

    def _running(self) -> list[Answer]:
        with self._lock:
            return [answer for answer in self._answers if answer.cache is not None]

    def _groups(self, planned: Sequence[_Planned]) -> list[list[_Planned]]:
        """Divide a step into forwards: one for all packed answers, and one per other answer."""
        together, groups = [], []
        for one in planned:
            if self._packs and one.answer.packs and one.answer not in self._suspects:
                together.append(one)
            else:
                groups.append([one])
        return [together, *groups] if together else groups

    def _forward(self, group: Sequence[_Planned]) -> Sequence[Tensor]:
        """Feed each answer its next tokens and drafts; returns the logits of each, (n, V)."""
        pieces = [answer.next_piece(tokens) for answer, tokens in group if answer.cache is not None]
        answer = group[0].answer
        if self._packs and answer.packs:
            logits = self._host.forward_packed(pieces)
        else:
            logits = answer.feed_alone(pieces[0])
        for (answer, _), piece in zip(group, pieces, strict=True):
            if piece.cache.fed % self.chunk == 0 and piece.cache.fed < len(answer.prompt):
                answer.origin.reuse.mark(answer)
        return torch.split(logits, [piece.last for piece in pieces])

    def _recover(self, group: Sequence[_Planned], error: BaseException) -> None:
        """Handle a failed forward: end answers that cannot be undone; then, if memory ran out,
        preempt an answer; otherwise end the answer if it ran alone, or else run each answer alone
        from now on."""
        undone = [answer.undo(error) for answer, _ in group if answer.cache is not None]
        running = self._running()
        left = [answer for answer in running if not answer.ended]
        if isinstance(error, OutOfMemoryError) and len(running) > 1:
            if left and all(undone):
                self._preempt(max(left, key=lambda answer: answer.rank))
            going = [answer for answer in self._running() if not answer.ended]
            self._limit, self._most = promised(going), max(1, len(going))
        elif len(group) == 1:
            group[0].answer.fail(error)
        else:
            self._suspects |= {answer for answer, _ in group}

    def _finish(self) -> None:
        """Choose the next tokens of each answer whose forward is complete."""
        for answer in [answer for answer in self._answers if answer.logits is not None]:
            self._suspects.discard(answer)
            if answer.reason in ("", STOP, LENGTH):
                self._try(answer, self._take)
            self._try(answer, Answer.settle)
            answer.logits = None

    def _take(self, answer: Answer) -> None:
        if not answer.tokens and not answer.reads_prompt and answer.origin.frozen is None:
            answer.origin.reuse.keep(answer)  # now, so that other answers find it early
        while not answer.ended and (answer.untold or answer.choose()):
            token, text, reason = answer.newest()
            self._found[answer, len(answer.tokens)] = NewToken(answer, token, text)
            answer.tell(text, reason)

    def _leave(self) -> None:
        """Remove ended and cancelled answers, and free their slots."""
        for answer in [x for x in self._answers if x.ended]:
            self._suspects.discard(answer)
            self._preemption.drop(answer)
            answer.origin.filled(answer.index)
            if answer not in self._ended:
                if answer.reason in (STOP, LENGTH) and answer.cache is not None:
                    answer.stats = answer.cache.stats()
                    answer.origin.reuse.keep(answer)
                self._tell_end(answer)
                self._ended.append(answer)
            answer.cache = None
            self._answers.remove(answer)

    def _tell_end(self, answer: Answer) -> None:
        try:
            if self._on_end is not None:
                self._on_end(answer)
        except Exception:
            self._ended.append(answer)  # must be appended only once
            raise

    def _fits(self, answers: Sequence[Answer]) -> bool:
        if len(answers) == 1:  # `add` has checked its bytes
            return True
        if self._most is not None and len(answers) > self._most:
            return False
        return self._limit is None or promised(answers) <= self._limit

    def _admit(self) -> None:
        """Admit answers while the promised bytes of all running answers fit: the highest priority
        first, queues in turn. An answer of higher priority preempts the youngest answer of the
        lowest priority, except while it waits for its store."""
        waiting = [x for x in self._answers if x.cache is None and not x.ended]
        fetching = {x.origin for x in waiting if x.origin.fetching}
        if not self._running():
            self._limit, self._most = self.max_bytes, self.sequences
        while waiting:
            first = self._admitted.next(waiting)
            running = self._running()
            stay = list(running)
            while not self._fits([*stay, first]):
                youngest = max(stay, key=lambda answer: answer.rank, default=None)
                if youngest is None or youngest.params.priority >= first.params.priority:
                    return
                stay.remove(youngest)
            waiting.remove(first)
            if not first.begun:
                origin = first.origin
                if not origin.reuse.ready(first, ask=len(fetching) < _FETCHES):
                    fetching |= {origin} if origin.fetching else set()
                    continue
            for answer in [x for x in running if x not in stay]:
                self._preempt(answer)
                waiting += [] if answer.ended else [answer]
            try:
                self._preemption.resume(first)
            except _INTERRUPTS:
                raise
            except BaseException as error:
                others = self._running()
                if not others or not isinstance(error, OutOfMemoryError):
                    first.fail(error)
                    continue
                # The answer stays preempted.
                self._limit, self._most = promised(others), len(others)
                return
            self._admitted.took(first)

    def _await_stores(self) -> None:
        """Wait briefly for stores if there is nothing to compute."""
        with self._lock:
            asked = {answer.origin.fetched for answer in self._answers if answer.origin.fetching}
        if asked:
            wait(filter(None, asked), _PATIENCE_S, FIRST_COMPLETED)

    def _preempt(self, answer: Answer) -> None:
        """Preempt an answer. If its cache cannot be copied, it ends with the error."""
        try:
            self._preemption.preempt(answer)
        except Exception as error:
            answer.fail(error)
            self._leave()

    def _planned(self) -> list[_Planned]:
        """The answers of the next step, with the number of tokens to feed each."""
        running = [x for x in self._running() if self._try(x, Answer.share)]
        ready = [answer for answer in running if answer.begun and answer.unfed == 1]
        planned = [_Planned(answer, 1) for answer in ready]
        generating, tokens = len(planned), sum(1 + answer.propose() for answer in ready)
        reading: set[Prompt] = set()  # prompts that one answer reads for all answers
        for answer in self._read.in_order([x for x in running if x not in ready]):
            origin = answer.origin
            if answer.forks:
                if not self._try(answer, Answer.fork):
                    continue
            elif origin in reading:
                continue
            # Ask the store as late as possible: other answers may store the prefix meanwhile.
            if (
                tokens + answer.next_count(self.chunk) > self.step_tokens
                and len(planned) > generating
            ):
                continue
            if not answer.begun and not self._try(answer, Answer.begin):
                continue
            if answer.reads_for_all:
                reading.add(origin)
            some = answer.next_count(self.chunk)
            self._read.took(answer)
            planned.append(_Planned(answer, some))
            tokens += some
        return planned

    def _try(self, answer: Answer, change: Callable[[Answer], None]) -> bool:
        """Change an answer; return whether it continues. An error ends only this answer."""
        try:
            change(answer)
        except _INTERRUPTS:
            raise
        except BaseException as error:
            answer.fail(error)
        return not answer.ended


class _Planned(NamedTuple):
    """An answer, and the number of its tokens that a step feeds, besides drafts."""

    answer: Answer
    tokens: int


class _Begun:
    """A context that is true from the start of a step until its return, and after an error."""

    def __init__(self) -> None:
        self._is = False

    def __bool__(self) -> bool:
        return self._is

    def __enter__(self) -> None:
        self._is = True

    def __exit__(self, kind: type[BaseException] | None, *raised: object) -> None:
        if kind is None:
            self._is = False
