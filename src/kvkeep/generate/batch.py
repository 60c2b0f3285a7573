"""Batch: the scheduler of many sequences. Each step is one packed forward."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from itertools import count
from threading import RLock
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvkeep.arguments import suggests
from kvkeep.errors import OutOfMemoryError, SpecError, StateError
from kvkeep.files.offload import Offload
from kvkeep.generate.answer import LENGTH, STOP, Answer, Prompt, promised
from kvkeep.generate.aside import Asides
from kvkeep.generate.intake import Intake
from kvkeep.generate.reuse import Reuse
from kvkeep.generate.sampling import SamplingParams
from kvkeep.generate.turns import Turns
from kvkeep.host import DEFAULT_SPEC, Marker, Specs, host_of
from kvkeep.host.keep_until import keep_until as spec_keeping
from kvkeep.store.prefix import PrefixStore
from kvkeep.threads import following_load

_ASKED = 4  # prompts whose stores are asked at once
_PATIENCE_S = 0.05  # how long a step waits for stores, if it has nothing else to do
_INTERRUPTS = (KeyboardInterrupt, SystemExit)


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

    Threads may add and cancel answers while one thread calls `step`. An answer whose store has to
    ask a backend waits for that alone, before it is admitted.

    Args:
        model: attached; others are computed one by one.
        tokenizer: turns prompts of text to token ids, and answers to text; None: prompts are token
            ids, and answers have no text.
        spec: what caches keep, unless `add` says otherwise.
        store: prefixes of prompts are looked up here, and prompts and answers are stored; None: no
            store.
        sequences: most answers at work; None: no limit. Others wait. If it is 1, steps are the
            model's own forwards.
        max_bytes: most bytes of slots that the answers at work may come to hold, by what their
            specs promise, and of recurrent states with their copies; None: no limit.
        chunk: prompts are read in chunks of this many tokens, whoever else is there, because what a
            policy evicts depends on them. So a long prompt delays others by one chunk. None: each
            prompt is read at once.
        step_tokens: most tokens of a step, but at least one of each answer that is being generated
            and one chunk.
        offload: where answers are put aside for others of higher priority, and nothing else is
            kept; None: host memory.
        on_end: called in `step` with each answer that ended, before its cache is freed; again after
            an interrupt.

    Raises:
        SpecError: a number below 1.
        UnsupportedError: `max_bytes` is given, but the model does not tell what its slots take; or
            the spec's policy is `kvzip`.
    """

    @suggests(SamplingParams)
    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        spec: Specs = DEFAULT_SPEC,
        store: PrefixStore | None = None,
        sequences: int | None = None,
        max_bytes: int | None = None,
        chunk: int | None = 256,
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
        self.max_bytes, self.step_tokens = max_bytes, step_tokens
        self.chunk = sys.maxsize if chunk is None else chunk
        self._asides, self._on_end = Asides(offload), on_end
        # Both are lowered when memory proves to be less.
        self._limit, self._most = max_bytes, self.sequences
        self._intake = Intake(self._host, tokenizer, spec, max_bytes=max_bytes, chunk=self.chunk)
        self._packs = self.sequences != 1 and not self._host.unpackable
        self._reuse = Reuse(model, store)
        self._orders = count()
        self._admitted, self._read = Turns(), Turns()
        self._suspects: set[Answer] = set()  # their forward failed; each is taken alone
        self._answers: list[Answer] = []  # in the order of arrival; at work are those with a cache
        # Of the last step: the answers that ended, the new tokens, and whether it is not complete.
        self._ended: list[Answer] = []
        self._found: dict[Answer, NewToken] = {}
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
        """Add a prompt. Its answers begin with the next step that has room for them.

        Args:
            prompt: text, or token ids (n,).
            params: how to continue it; None: the defaults.
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
        """Answers at work."""
        return len(self._at_work())

    @property
    def waiting(self) -> int:
        """Answers that wait for room or for a store, those put aside among them."""
        with self._lock:
            return sum(answer.cache is None for answer in self._answers)

    @property
    def promised_bytes(self) -> int:
        """Bytes of slots that the answers at work may come to hold."""
        return promised(self._at_work())

    @property
    def live_bytes(self) -> int:
        """Bytes of the slots in use; those that answers share count once for each."""
        with self._lock:
            return sum(answer.cache.live_bytes for answer in self._answers if answer.cache)

    def __iter__(self) -> Iterator[Answer]:
        """Take steps until all answers ended, and yield each when it has."""
        while self._answers or self._begun or self._ended:
            if self._begun or not self._ended:
                self.step()
            while self._ended:
                yield self._ended.pop(0)

    def flush(self) -> None:
        """Wait until the store's backend has what was stored: steps do not wait for it."""
        self._reuse.flush()

    # -- a step -----------------------------------------------------------------------------

    def step(self) -> list[NewToken]:
        """Admit answers and take one step; [] if no prompt was completed and no token is due.

        If the forward of several answers fails, each is taken alone, and one that fails again ends
        with that error. For want of memory, the youngest is put aside instead.

        After an interrupt (KeyboardInterrupt), call it again: each answer's part of the interrupted
        step is completed or undone, and the next step returns what the interrupted one had found.
        If an answer's part cannot be undone, because its cache has evicted tokens, that answer ends
        with a StateError.
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
                self._finish()  # a step that was interrupted
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
                        break  # others may have been put aside
                else:
                    with self._lock:
                        for (answer, _), row in zip(group, logits, strict=True):
                            answer.advance(row)
                        self._finish()
                        self._leave()
            if not groups:
                self._await_stores()
            if self._found or not failed:
                return

    def _mend(self) -> None:
        """Undo what an interrupted step has begun and not completed. It may be interrupted too."""
        with self._lock:
            for answer in self._at_work():
                if not answer.ended:
                    answer.undo(
                        StateError(
                            "a step of the batch was interrupted after it had changed this "
                            "answer's cache in a way that cannot be undone, such as an eviction; "
                            "add its prompt again"
                        ),
                    )
            self._asides.retain(self._answers)

    def _at_work(self) -> list[Answer]:
        with self._lock:
            return [answer for answer in self._answers if answer.cache is not None]

    def _groups(self, planned: Sequence[_Planned]) -> list[list[_Planned]]:
        """Divide a step into forwards: one of all that can be packed, and one each of the rest."""
        together, groups = [], []
        for one in planned:
            if self._packs and one.answer.packs and one.answer not in self._suspects:
                together.append(one)
            else:
                groups.append([one])
        return [together, *groups] if together else groups

    def _forward(self, group: Sequence[_Planned]) -> Tensor:
        """Feed each answer its next tokens; returns logits (answers, V)."""
        pieces = [answer.next_piece(tokens) for answer, tokens in group if answer.cache is not None]
        (ids, cache), answer = pieces[0], group[0].answer
        if self._packs and answer.packs:
            logits = self._host.forward_packed(pieces)
        else:
            last = len(ids) if answer.scores_prompt else 1
            logits = self._host.forward(ids[None].to(self._host.device), cache, last=last)[0]
            if answer.scores_prompt:
                answer.score(logits)
            logits = logits[-1:]
        for (answer, _), piece in zip(group, pieces, strict=True):
            if piece.cache.fed % self.chunk == 0 and piece.cache.fed < len(answer.prompt):
                answer.origin.reuse.mark(answer)
        return logits

    def _recover(self, group: Sequence[_Planned], error: BaseException) -> None:
        """After a forward failed: end what cannot go back or failed alone, put an answer aside for
        want of memory, or suspect each."""
        undone = [answer.undo(error) for answer, _ in group if answer.cache is not None]
        running = self._at_work()
        left = [answer for answer in running if not answer.ended]
        if isinstance(error, OutOfMemoryError) and len(running) > 1:
            if left and all(undone):
                self._put_aside(max(left, key=lambda answer: answer.rank))
            going = [answer for answer in self._at_work() if not answer.ended]
            self._limit, self._most = promised(going), max(1, len(going))
        elif len(group) == 1:
            group[0].answer.fail(error)
        else:
            self._suspects |= {answer for answer, _ in group}

    def _finish(self) -> None:
        """Choose the next tokens of the answers that were just fed all of theirs."""
        for answer in [answer for answer in self._answers if answer.logits is not None]:
            self._suspects.discard(answer)
            if not answer.ended:
                self._try(answer, self._take)
            answer.logits = None

    def _take(self, answer: Answer) -> None:
        if not answer.tokens and not answer.reads_prompt and answer.origin.frozen is None:
            answer.origin.reuse.keep(answer)  # now: others find it while this one goes on
        answer.choose()
        if answer.untold:
            token, text, reason = answer.newest()
            self._found[answer] = NewToken(answer, token, text)
            answer.tell(text, reason)

    def _leave(self) -> None:
        """Free what ended, or was cancelled."""
        for answer in [x for x in self._answers if x.ended]:
            self._suspects.discard(answer)
            self._asides.drop(answer)
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
            self._ended.append(answer)  # once is enough
            raise

    def _fits(self, answers: Sequence[Answer]) -> bool:
        if len(answers) == 1:  # `add` has compared its bytes
            return True
        if self._most is not None and len(answers) > self._most:
            return False
        return self._limit is None or promised(answers) <= self._limit

    def _admit(self) -> None:
        """Admit answers as long as what all promise fits: those of the highest priority first, of
        each queue in turn. For an answer of higher priority, the youngest of the lowest priority is
        put aside. An answer that waits for its store takes nobody's place."""
        waiting = [x for x in self._answers if x.cache is None and not x.ended]
        fetching = {x.origin for x in waiting if x.origin.fetching}
        if not self._at_work():
            self._limit, self._most = self.max_bytes, self.sequences
        while waiting:
            first = self._admitted.next(waiting)
            running = self._at_work()
            stay = list(running)
            while not self._fits([*stay, first]):
                youngest = max(stay, key=lambda answer: answer.rank, default=None)
                if youngest is None or youngest.params.priority >= first.params.priority:
                    return
                stay.remove(youngest)
            waiting.remove(first)
            if not first.begun:
                origin = first.origin
                if not origin.reuse.ready(first, ask=len(fetching) < _ASKED):
                    fetching |= {origin} if origin.fetching else set()
                    continue
            for answer in [x for x in running if x not in stay]:
                self._put_aside(answer)
                waiting += [] if answer.ended else [answer]
            try:
                self._asides.take_back(first)
            except _INTERRUPTS:
                raise
            except BaseException as error:
                others = self._at_work()
                if not others or not isinstance(error, OutOfMemoryError):
                    first.fail(error)
                    continue
                # What it holds stays aside.
                self._limit, self._most = promised(others), len(others)
                return
            self._admitted.took(first)

    def _await_stores(self) -> None:
        """Where nothing can be computed, wait a little for the stores that are being asked."""
        with self._lock:
            asked = {answer.origin.fetched for answer in self._answers if answer.origin.fetching}
        if asked:
            wait(filter(None, asked), _PATIENCE_S, FIRST_COMPLETED)

    def _put_aside(self, answer: Answer) -> None:
        """Let an answer wait. If there is no room for what it holds, it ends with that error."""
        try:
            self._asides.put(answer)
        except Exception as error:
            answer.fail(error)
            self._leave()

    def _planned(self) -> list[_Planned]:
        """The answers of the next step, and how many tokens each is fed."""
        running = [x for x in self._at_work() if self._try(x, Answer.share)]
        ready = [answer for answer in running if answer.begun and answer.unfed == 1]
        planned = [_Planned(answer, 1) for answer in ready]
        generating, tokens = len(planned), len(planned)
        reading: set[Prompt] = set()  # that one answer reads for all
        for answer in self._read.in_order([x for x in running if x not in ready]):
            origin = answer.origin
            if answer.forks:
                if not self._try(answer, Answer.fork):
                    continue
            elif origin in reading:
                continue
            # The store is asked as late as possible: what others read may be there by then.
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
        """Change an answer; returns whether it goes on. An error ends it, and no other."""
        try:
            change(answer)
        except _INTERRUPTS:
            raise
        except BaseException as error:
            answer.fail(error)
        return not answer.ended


class _Planned(NamedTuple):
    """An answer, and how many of its tokens a step feeds."""

    answer: Answer
    tokens: int


class _Begun:
    """Whether a step has begun that did not return: its context, which ends only without an
    error."""

    def __init__(self) -> None:
        self._is = False

    def __bool__(self) -> bool:
        return self._is

    def __enter__(self) -> None:
        self._is = True

    def __exit__(self, kind: type[BaseException] | None, *raised: object) -> None:
        if kind is None:
            self._is = False
