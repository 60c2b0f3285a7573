"""Answer: a prompt and what the model continues it with, in a batch."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from kvkeep.cache import CacheStats, Frozen
from kvkeep.errors import OutOfMemoryError, RollbackError, StateError
from kvkeep.generate.sampling import SamplingParams, sample
from kvkeep.generate.text import TextStream
from kvkeep.host import Host, ModelCache, Piece, Specs

if TYPE_CHECKING:
    from kvkeep.generate.reuse import Reuse

STOP, LENGTH, CANCELLED, ERROR = "stop", "length", "cancelled", "error"
_AT_ONCE = 32  # tokens of a prompt that are scored at once: each takes memory of the vocabulary


class Likely(NamedTuple):
    """A token, and the logarithm of its probability."""

    token: int
    logprob: float


class Score(NamedTuple):
    """The logarithm of a token's probability, and the likeliest tokens in its place, the likeliest
    first."""

    logprob: float
    top: list[Likely]


class Prompt:
    """A prompt, whose answers share its slots.

    Args:
        ids: int64 (n,), on the CPU.
        params: how to continue it.
        answers: how many answers it has.
        spec: what their caches keep.
        queue: its answers are admitted in turn with those of other queues.
        namespace: of the store's entries that it may begin with; None: none, and it leaves none.
        reuse: begins its caches, and keeps what they were fed.

    Attributes:
        scores: of each of its tokens but the first, if they were asked for and were read.
        own_bytes: the most bytes that each answer may come to hold by itself.
        shared_bytes: what its answers hold together: its tokens but the last, if they can share
            these, and the copies of recurrent states for a store.
        fetched: done when its store has asked its backend; None: that has not begun.
    """

    def __init__(
        self,
        ids: Tensor,
        params: SamplingParams,
        answers: int,
        *,
        spec: Specs,
        queue: str,
        namespace: str | None,
        reuse: Reuse,
    ) -> None:
        self.ids, self.params, self.answers, self.spec = ids, params, answers, spec
        self.queue, self.namespace, self.reuse = queue, namespace, reuse
        self.own_bytes = self.shared_bytes = 0
        self._unfilled = set(range(answers))  # answers whose caches do not hold it yet
        self.frozen: Frozen[ModelCache] | None = None  # all but the last token
        self.fetched: Future[None] | None = None
        self.scores: list[Score] = []

    @property
    def fetching(self) -> bool:
        """Whether its store is asking its backend."""
        return self.fetched is not None and not self.fetched.done()

    @property
    def awaited(self) -> bool:
        """Whether some answer's cache does not hold it yet."""
        return bool(self._unfilled)

    def filled(self, index: int) -> None:
        """Note that an answer's cache holds it, or needs it no more."""
        self._unfilled.discard(index)
        if not self._unfilled:
            self.frozen = None


@dataclass
class _Choice:
    """What is known of the choice of an answer's next token, should it be interrupted.

    Attributes:
        index: of the token.
        random: the state of the random numbers before it.
        begun: whether logits processors have been called.
        logits: what they returned, (1, V).
    """

    index: int
    random: Tensor | None
    begun: bool = False
    logits: Tensor | None = None


class Answer:
    """One answer of a batch. Its tokens, and how many of them were fed and told, are the state from
    which it goes on after an interrupt; each changes in one statement.

    Attributes:
        prompt: the prompt's token ids, int64 (n,).
        index: which of the prompt's n answers it is.
        params: as given.
        tokens: the new token ids so far.
        logprobs: one for each of `tokens`, if they were asked for.
        top_logprobs: for each of `tokens` the likeliest ones, the likeliest first, if they were
            asked for.
        text: the text so far; empty without a tokenizer. What may still become a stop string, or is
            an incomplete character, is held back.
        reason: why it ended: "stop", "length", "cancelled" or "error"; empty while it goes on.
        error: what was raised, if the reason is "error". (A panic of a tokenizer written in Rust is
            no Exception.)
        cached: tokens of the prompt that were found in a store.
        stats: of its cache, when it was complete; None before, and if it was cancelled or failed.
        fed: how many of its tokens its cache holds between steps.
        logits: (V,) of the last token fed, until the step has dealt with them.
    """

    def __init__(
        self, origin: Prompt, index: int, *, order: int, host: Host, tokenizer: Any
    ) -> None:
        self.origin, self.index, self.order, self.params = origin, index, order, origin.params
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.top_logprobs: list[list[Likely]] = []
        self.text, self.reason, self.cached = "", "", 0
        self.error: BaseException | None = None
        self.stats: CacheStats | None = None
        self.cache: ModelCache | None = None  # None: waiting, put aside or ended
        self.begun = False  # its cache is from the store, if the store has its prompt
        self.aside: Any = None  # what was put aside
        given = origin.reuse.given
        self.fed = 0 if given is None else given.fed
        self.logits: Tensor | None = None
        ends = self.params.end_tokens
        self._ends = host.end_tokens() if ends is None else ends
        self._text = (
            None
            if tokenizer is None
            else TextStream(tokenizer, self.params.stop, self.params.shown_tokens)
        )
        self._processors = [*self.params.processors]
        self._processors += [make() for make in self.params.own_processors]
        self._told = 0  # tokens that were told
        self._added = self._first = self._last = perf_counter()
        self._choice = _Choice(-1, None)
        self._device = host.device
        self._random: torch.Generator | None = None
        if self.params.temperature > 0:
            self._random = torch.Generator(self._device)
            seed = self.params.seed
            self._random.seed() if seed is None else self._random.manual_seed(seed + index)

    def __repr__(self) -> str:
        state = self.reason or ("waiting" if self.cache is None else "running")
        return f"Answer({len(self.prompt)} + {len(self.tokens)} tokens, {state})"

    @property
    def prompt(self) -> Tensor:
        return self.origin.ids

    @property
    def ttft_s(self) -> float:
        """Seconds from when it was added to its first token; 0 before that."""
        return self._first - self._added

    @property
    def tokens_per_s(self) -> float:
        """The speed after the first token; 0 before the second."""
        return (self._told - 1) / (self._last - self._first) if self._told > 1 else 0.0

    @property
    def ended(self) -> bool:
        """Whether it is complete, or was cancelled."""
        return bool(self.reason)

    def cancel(self) -> None:
        """End it: the batch frees its slots before the next step. What it has stays."""
        if not self.reason:
            self.reason = CANCELLED

    def fail(self, error: BaseException) -> None:
        """End it because of an error."""
        self.reason, self.error = self.reason or ERROR, error

    @property
    def reads_prompt(self) -> bool:
        """Whether its cache lacks tokens of the prompt that all of its answers share: all but the
        last."""
        return (0 if self.cache is None else self.cache.fed) < len(self.prompt) - 1

    @property
    def reads_for_all(self) -> bool:
        """Whether its next tokens are those of the prompt that all answers share."""
        return self.origin.answers > 1 and self.origin.frozen is None and self.reads_prompt

    @property
    def forks(self) -> bool:
        """Whether it can begin with what another answer read of the prompt."""
        return self.origin.frozen is not None and self.reads_prompt

    @property
    def rank(self) -> tuple[int, int]:
        """Sorts answers by priority, then age."""
        return -self.params.priority, self.order

    @property
    def ids(self) -> Tensor:
        """The prompt's and the new token ids, int64 (n,)."""
        return torch.cat([self.prompt, torch.tensor(self.tokens, dtype=torch.int64)])

    @property
    def unfed(self) -> int:
        """How many of its tokens its cache does not hold."""
        fed = 0 if self.cache is None else self.cache.fed
        return len(self.prompt) + len(self.tokens) - fed

    @property
    def packs(self) -> bool:
        """Whether its tokens may be fed in one forward with the tokens of other answers."""
        assert self.cache is not None
        return self.cache.activation is None and not self.scores_prompt

    def next_piece(self, count: int) -> Piece:
        """Its next `count` tokens to feed."""
        assert self.cache is not None
        fed, prompt = self.cache.fed, len(self.prompt)
        if fed >= prompt:
            ids = torch.tensor(self.tokens[fed - prompt :][:count])
        else:
            ids = (
                self.prompt[fed : fed + count] if fed + count <= prompt else self.ids[fed:][:count]
            )
        return Piece(ids, self.cache)

    def next_count(self, chunk: int) -> int:
        """How many of its tokens to feed next, if its prompt is read in chunks of this many."""
        assert self.cache is not None
        fed, activation = self.cache.fed, self.cache.activation
        # The last token of a prompt that one reads for all is each answer's own.
        borders = [self.unfed - self.reads_for_all, chunk - fed % chunk]
        if activation is not None and activation.start > fed:
            borders.append(activation.start - fed)  # the adapter's forwards are its own
        return min(borders)

    def begin(self) -> None:
        """Begin with what the store has of its prompt."""
        self.hold(self.origin.reuse.begin(self))
        self.share()

    def fork(self) -> None:
        """Begin with what another answer read of the prompt."""
        assert self.origin.frozen is not None
        self.hold(self.origin.frozen.fork())
        self.origin.filled(self.index)

    def share(self) -> None:
        """Freeze what it read for all answers to its prompt, once that is complete."""
        cache, origin = self.cache, self.origin
        assert cache is not None
        if not self.reads_prompt:
            origin.filled(self.index)
        if origin.awaited and origin.frozen is None and 0 < cache.fed == len(origin.ids) - 1:
            with suppress(OutOfMemoryError):  # each answer then reads the prompt itself
                origin.frozen = cache.freeze()

    def undo(self, error: BaseException) -> bool:
        """Return its cache to what it held before the step; returns whether that was possible.
        Otherwise it ends with the error."""
        assert self.cache is not None
        try:
            self.cache.rewind(self.fed)
        except (RollbackError, StateError):
            self.fail(error)
            return False
        return True

    def hold(self, cache: ModelCache) -> None:
        """Go on with a cache that holds its first tokens."""
        self.cache, self.fed, self.begun = cache, cache.fed, True

    def advance(self, logits: Tensor) -> None:
        """Note that a forward has fed its cache; logits (V,) of the last token fed."""
        assert self.cache is not None
        self.fed, self.logits = self.cache.fed, logits.to(self._device)

    def choose(self) -> None:
        """Choose the next token, if that is due. It may be called again after it was interrupted.

        Raises:
            StateError: its logits processors were interrupted.
            Exception: of a processor.
        """
        logits, at = self.logits, len(self.tokens)
        if logits is None or self.fed < len(self.prompt) + at:
            return
        choice = self._choice
        if choice.index != at:
            random = None if self._random is None else self._random.get_state()
            choice = self._choice = _Choice(at, random)
        elif self._random is not None and choice.random is not None:
            self._random.set_state(choice.random)
        row = self._processed(logits, choice)
        token = int(sample(row, self.params, self._random))
        self._record(token, logits)
        self.tokens.append(token)

    def _processed(self, logits: Tensor, choice: _Choice) -> Tensor:
        """Logits (1, V), after the processors."""
        row, processors = logits[None], self._processors
        if choice.logits is not None or not processors:
            return row if choice.logits is None else choice.logits
        if choice.begun:
            raise StateError(
                "the logits processors of this answer were interrupted, and may remember what they "
                "were given; add its prompt again"
            )
        choice.begun = True
        ids = self.ids[None].to(self._device)
        for process in processors:
            row = process(ids, row)
        choice.logits = row
        return row

    @property
    def untold(self) -> bool:
        """Whether its newest token was not told."""
        return self._told < len(self.tokens)

    @property
    def text_offset(self) -> int:
        """Characters of its text before the newest token, those that are held back too; 0 without
        a tokenizer."""
        return 0 if self._text is None else self._text.offset

    def newest(self) -> tuple[int, str, str]:
        """The newest token, the text that it completes, and why the answer ends with it; empty if
        it does not. `tell` follows."""
        token, text, stopped = self.tokens[-1], "", False
        full, ends = len(self.tokens) == self.params.max_new_tokens, token in self._ends
        if self._text is not None:
            text = self._text.take(self.tokens, last=full or ends, ends=ends)
            stopped = self._text.stopped
        reason = STOP if stopped or ends else LENGTH if full else ""
        return token, text, reason

    def tell(self, text: str, reason: str) -> None:
        """Note what `newest` found."""
        self._last = perf_counter()
        self._first = self._first if self._told else self._last
        told, text = len(self.tokens), self.text + text
        self.text, self.reason, self._told = text, reason or self.reason, told

    def _record(self, token: int, logits: Tensor) -> None:
        params, at = self.params, len(self.tokens)
        if not params.logprobs and not params.top_logprobs:
            return
        del self.logprobs[at:], self.top_logprobs[at:]  # of a choice that was interrupted
        (score,) = _scores(logits[None], [token], params)
        if params.logprobs:
            self.logprobs.append(score.logprob)
        if params.top_logprobs:
            self.top_logprobs.append(score.top)

    @property
    def scores_prompt(self) -> bool:
        """Whether its next tokens are of the prompt, whose logits are asked for."""
        return self.params.prompt_logprobs and self.fed < len(self.prompt) - 1

    def score(self, logits: Tensor) -> None:
        """Record the scores of the prompt's next tokens; logits (n, V) of the n tokens that a
        forward has fed. It may be called again with logits of the same tokens."""
        assert self.cache is not None
        ids, scores = self.prompt, self.origin.scores
        first, end = self.cache.fed - len(logits), min(self.cache.fed, len(ids) - 1)
        for at in range(len(scores), end, _AT_ONCE):
            some = ids[at + 1 : min(at + _AT_ONCE, end) + 1].tolist()
            scores += _scores(logits[at - first :][: len(some)], some, self.params)


def _scores(logits: Tensor, tokens: Sequence[int], params: SamplingParams) -> list[Score]:
    """Scores of n tokens by logits (n, V)."""
    logprobs = (logits.float() / params.logprob_temperature).log_softmax(dim=-1)
    ids = torch.tensor(tokens, device=logits.device)
    own = logprobs.gather(1, ids[:, None])[:, 0].tolist()
    top: list[list[Likely]] = [[] for _ in tokens]
    if params.top_logprobs:
        best = logprobs.topk(min(params.top_logprobs, logprobs.shape[-1]))
        rows = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        top = [list(map(Likely, ids, values)) for ids, values in rows]
    return list(map(Score, own, top))


def promised(answers: Sequence[Answer]) -> int:
    """The most bytes that answers at work may come to hold together."""
    prompts = {id(answer.origin): answer.origin for answer in answers}
    own = sum(answer.origin.own_bytes for answer in answers)
    return own + sum(prompt.shared_bytes for prompt in prompts.values())
