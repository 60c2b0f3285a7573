"""Answer: a prompt in a batch, and the model's continuation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvkeep.cache import CacheStats, Frozen
from kvkeep.errors import OutOfMemoryError, RollbackError, StateError
from kvkeep.generate.drafting import Drafting
from kvkeep.generate.reuse import Reuse
from kvkeep.generate.sampler import Sampler
from kvkeep.generate.sampling import SamplingParams
from kvkeep.generate.text import TextStream
from kvkeep.host import Host, ModelCache, Piece, Specs

STOP, LENGTH, CANCELLED, ERROR = "stop", "length", "cancelled", "error"
_AT_ONCE = 32  # prompt tokens scored together; each takes memory for a row of logits


class Likely(NamedTuple):
    """A token and its log probability."""

    token: int
    logprob: float


class Score(NamedTuple):
    """A token's log probability, and the likeliest tokens at its place, in descending order."""

    logprob: float
    top: list[Likely]


class Prompt:
    """A prompt, whose answers share its slots.

    Args:
        ids: int64 (n,), on the CPU.
        params: the sampling parameters of its answers.
        answers: the number of its answers.
        spec: the spec of their caches.
        queue: queues are served in turn.
        namespace: the namespace of the store to read from and write to; None: use no store.
        reuse: starts its caches from a store, and stores them.

    Attributes:
        scores: the scores of its read tokens except the first, if requested.
        own_bytes: the most bytes that each answer may hold by itself.
        shared_bytes: the bytes that its answers hold together: its tokens but the last, if they
            can be shared, and the copies of recurrent states for a store.
        fetched: future of the store's request to its backend; None: not begun.
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
        self._unfilled = set(range(answers))  # indices of answers whose caches lack the prompt
        self.frozen: Frozen[ModelCache] | None = None  # the prompt except its last token
        self.fetched: Future[None] | None = None
        self.scores: list[Score] = []

    @property
    def fetching(self) -> bool:
        """Whether a request to the store's backend is in progress."""
        return self.fetched is not None and not self.fetched.done()

    @property
    def awaited(self) -> bool:
        """Whether the cache of some answer lacks the prompt."""
        return bool(self._unfilled)

    def filled(self, index: int) -> None:
        """Record that an answer's cache holds the prompt, or no longer needs it."""
        self._unfilled.discard(index)
        if not self._unfilled:
            self.frozen = None

    def score(self, logits: Tensor, fed: int) -> None:
        """Record scores of tokens from the logits (n, V) of the last n tokens, after `fed` tokens
        were fed. It may be called again with the same tokens."""
        first, end = fed - len(logits), min(fed, len(self.ids) - 1)
        for at in range(len(self.scores), end, _AT_ONCE):
            some = self.ids[at + 1 : min(at + _AT_ONCE, end) + 1].tolist()
            self.scores += _scores(logits[at - first :][: len(some)], some, self.params)


class Answer:
    """One answer of a batch. After an interrupt it resumes from its tokens and its counts of fed
    and reported tokens; each of these changes in one statement.

    Attributes:
        prompt: the prompt's token ids, int64 (n,).
        index: its index among the prompt's n answers.
        params: the sampling parameters.
        tokens: the new token ids so far.
        logprobs: the log probability of each token, if requested.
        top_logprobs: for each token the likeliest tokens in descending order, if requested.
        text: the text so far; empty without a tokenizer. A possible start of a stop string and an
            incomplete character are held back.
        reason: why it ended: "stop", "length", "cancelled" or "error"; empty before.
        error: the exception, if the reason is "error". (A panic of a tokenizer written in Rust is
            not an Exception.)
        cached: prompt tokens that were found in a store.
        stats: the statistics of its cache at a regular end; otherwise None.
        text_offsets: for each token, the characters of the text before it, including held-back
            characters; 0 without a tokenizer.
        fed: its tokens that the cache holds between steps; during a step, with the drafts fed.
        drafts: the tokens that a forward feeds after the answer's newest token.
        logits: (n, V) of the newest token and of the drafts fed, until the next tokens are chosen.
    """

    def __init__(
        self, origin: Prompt, index: int, *, order: int, host: Host, tokenizer: Any
    ) -> None:
        self.origin, self.index, self.order, self.params = origin, index, order, origin.params
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.top_logprobs: list[list[Likely]] = []
        self.text_offsets: list[int] = []
        self.text, self.reason, self.cached = "", "", 0
        self.error: BaseException | None = None
        self.stats: CacheStats | None = None
        self.cache: ModelCache | None = None  # None: waiting, preempted or ended
        self.begun = False  # whether the store was asked for the prompt
        self.preempted: Any = None  # the copy of its cache while it is preempted
        given = origin.reuse.given
        self.fed = 0 if given is None else given.fed
        self.drafts: list[int] = []
        self.logits: Tensor | None = None
        self._drafting = Drafting(self.params.drafts)
        ends = self.params.end_tokens
        self._ends = host.end_tokens() if ends is None else ends
        self._text = (
            None
            if tokenizer is None
            else TextStream(tokenizer, self.params.stop, self.params.shown_tokens)
        )
        self._told = 0  # number of tokens reported by steps
        self._added = self._first = self._last = perf_counter()
        self._host, self._device = host, host.device
        self._sampler = Sampler(self.params, index, self._device)

    def __repr__(self) -> str:
        state = self.reason or ("waiting" if self.cache is None else "running")
        return f"Answer({len(self.prompt)} + {len(self.tokens)} tokens, {state})"

    @property
    def prompt(self) -> Tensor:
        return self.origin.ids

    @property
    def ttft_s(self) -> float:
        """Seconds from `Batch.add` to the first token; 0 before the first token."""
        return self._first - self._added

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second after the first token; 0 before the second token."""
        return (self._told - 1) / (self._last - self._first) if self._told > 1 else 0.0

    @property
    def ended(self) -> bool:
        """Whether it is complete, or was cancelled."""
        return bool(self.reason)

    def cancel(self) -> None:
        """End the answer with its tokens and text; the batch frees its slots before the next
        step."""
        if not self.reason:
            self.reason = CANCELLED

    def fail(self, error: BaseException) -> None:
        """End the answer because of an error."""
        self.reason, self.error = self.reason or ERROR, error

    @property
    def reads_prompt(self) -> bool:
        """Whether its cache lacks prompt tokens, not counting the last one."""
        return (0 if self.cache is None else self.cache.fed) < len(self.prompt) - 1

    @property
    def reads_for_all(self) -> bool:
        """Whether it reads the prompt on behalf of all its answers."""
        return self.origin.answers > 1 and self.origin.frozen is None and self.reads_prompt

    @property
    def forks(self) -> bool:
        """Whether it can start with a fork of another answer's cache."""
        return self.origin.frozen is not None and self.reads_prompt

    @property
    def rank(self) -> tuple[int, int]:
        """Sort key: priority, then age."""
        return -self.params.priority, self.order

    @property
    def ids(self) -> Tensor:
        """The prompt's and the new token ids, int64 (n,)."""
        return torch.cat([self.prompt, torch.tensor(self.tokens, dtype=torch.int64)])

    @property
    def unfed(self) -> int:
        """The number of its tokens that the cache lacks."""
        fed = 0 if self.cache is None else self.cache.fed
        return len(self.prompt) + len(self.tokens) - fed

    @property
    def packs(self) -> bool:
        """Whether its tokens may be fed in one forward with the tokens of other answers."""
        assert self.cache is not None
        return not (self.cache.alone or self.scores_prompt or self.media)

    @property
    def media(self) -> Mapping[str, Tensor]:
        """Inputs of the next forward besides the ids: the prompt, if it has images."""
        return {} if self.cache is None or self.cache.fed else self.origin.reuse.media

    def propose(self) -> int:
        """Choose the drafts of the next forward, which feeds the newest token; return how many."""
        most = min(self.params.drafts, self.params.max_new_tokens - len(self.tokens) - 1)
        if most < 1 or not self.tokens:  # a store may get the cache before the first token
            self.drafts = []
        else:
            self.drafts = self._drafting.propose(self.prompt, self.tokens, most)
        return len(self.drafts)

    def next_piece(self, count: int) -> Piece:
        """Its next `count` tokens to feed, and the drafts."""
        assert self.cache is not None
        fed, prompt = self.cache.fed, len(self.prompt)
        if fed >= prompt:
            ids = torch.tensor(self.tokens[fed - prompt :][:count])
        else:
            ids = (
                self.prompt[fed : fed + count] if fed + count <= prompt else self.ids[fed:][:count]
            )
        if self.drafts:
            self.cache.record_drafts(True)
            ids = torch.cat([ids, torch.tensor(self.drafts)])
        return Piece(ids, self.cache, 1 + len(self.drafts))

    def feed_alone(self, piece: Piece) -> Tensor:
        """Feed its next tokens in their own forward; return logits (piece.last, V)."""
        assert self.cache is not None
        host, given = self._host, piece.ids[None].to(self._device)
        if self.media:
            return host.read(given, self.cache, self.media)[0]
        last = len(piece.ids) if self.scores_prompt else piece.last
        logits = host.forward(given, self.cache, last=last)[0]
        if self.scores_prompt:
            self.origin.score(logits, self.cache.fed)
        return logits[-piece.last :]

    def next_count(self, chunk: int) -> int:
        """The number of tokens to feed next; the prompt is read in chunks of `chunk` tokens."""
        assert self.cache is not None
        fed, activation = self.cache.fed, self.cache.activation
        # Of a shared prompt, each answer feeds the last token itself.
        whole = self.unfed - self.reads_for_all
        borders = [whole, whole if self.media else chunk - fed % chunk]
        if activation is not None and activation.start > fed:
            borders.append(activation.start - fed)  # the adapter is on or off for a whole forward
        return min(borders)

    def begin(self) -> None:
        """Start with the prompt tokens that the store holds."""
        self.hold(self.origin.reuse.begin(self))
        self.share()

    def fork(self) -> None:
        """Start with a fork of the cache of another answer to the prompt."""
        assert self.origin.frozen is not None
        self.hold(self.origin.frozen.fork())
        self.origin.filled(self.index)

    def share(self) -> None:
        """Freeze its cache for the other answers to its prompt, once it holds the prompt."""
        cache, origin = self.cache, self.origin
        assert cache is not None
        if not self.reads_prompt:
            origin.filled(self.index)
        if origin.awaited and origin.frozen is None and 0 < cache.fed == len(origin.ids) - 1:
            with suppress(OutOfMemoryError):  # each answer then reads the prompt itself
                origin.frozen = cache.freeze()

    def undo(self, error: BaseException) -> bool:
        """Restore the cache to its state before the step; return whether this was possible. If not,
        the answer ends with the error."""
        assert self.cache is not None
        if self.logits is not None:  # its forward is complete
            return True
        try:
            self.cache.rewind(self.fed)
            if self.drafts:
                self.cache.record_drafts(False)
                self.drafts = []
        except (RollbackError, StateError):
            self.fail(error)
            return False
        return True

    def hold(self, cache: ModelCache) -> None:
        """Continue with a cache that holds its first tokens."""
        self.cache, self.fed, self.begun = cache, cache.fed, True

    def advance(self, logits: Tensor) -> None:
        """Record that a forward has fed the cache; logits (n, V) of the last tokens fed."""
        assert self.cache is not None
        self.fed, self.logits = self.cache.fed, logits.to(self._device)

    def choose(self) -> bool:
        """Choose the next token, if the logits for it are known; return whether they are. It may be
        called again after an interrupt.

        Raises:
            StateError: its logits processors were interrupted.
            Exception: raised by a processor.
        """
        drafts, at = self.drafts, len(self.tokens)
        row = len(self.prompt) + at - (self.fed - len(drafts))
        if self.logits is None or row > len(drafts) or (row and self.tokens[-1] != drafts[row - 1]):
            return False
        logits, params = self.logits[row], self.params
        token = self._sampler.choose(logits, lambda: self.ids, at)
        if params.logprobs or params.top_logprobs:
            del self.logprobs[at:], self.top_logprobs[at:]  # from an interrupted choice
            (score,) = _scores(logits[None], [token], params)
            if params.logprobs:
                self.logprobs.append(score.logprob)
            if params.top_logprobs:
                self.top_logprobs.append(score.top)
        self.tokens.append(token)
        return True

    def settle(self) -> None:
        """Remove the drafts that were not chosen. It may be called again after an interrupt."""
        cache, drafts = self.cache, len(self.drafts)
        assert cache is not None
        if drafts:
            kept = len(self.prompt) + len(self.tokens) - 1
            self._drafting.learn(drafts, drafts - (self.fed - kept))
            cache.rewind(kept)
            cache.record_drafts(False)
        self.fed, self.drafts, self.logits = cache.fed, [], None

    @property
    def untold(self) -> bool:
        """Whether the newest token is not yet reported."""
        return self._told < len(self.tokens)

    def newest(self) -> tuple[int, str, str]:
        """The newest token, the text that it completes, and the reason if it ends the answer
        (otherwise empty). Call `tell` with them."""
        token, text, stopped = self.tokens[-1], "", False
        full, ends = len(self.tokens) == self.params.max_new_tokens, token in self._ends
        if self._text is not None:
            text = self._text.take(self.tokens, last=full or ends, ends=ends)
            stopped = self._text.stopped
        self.text_offsets[len(self.tokens) - 1 :] = [0 if self._text is None else self._text.offset]
        reason = STOP if stopped or ends else LENGTH if full else ""
        return token, text, reason

    def tell(self, text: str, reason: str) -> None:
        """Add a text and a reason from `newest` to the answer."""
        self._last = perf_counter()
        self._first = self._first if self._told else self._last
        told, text = len(self.tokens), self.text + text
        self.text, self.reason, self._told = text, reason or self.reason, told

    @property
    def scores_prompt(self) -> bool:
        """Whether its next tokens are prompt tokens that need scores."""
        return self.params.prompt_logprobs and self.fed < len(self.prompt) - 1


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
    """The most bytes that a set of answers may hold together."""
    prompts = {id(answer.origin): answer.origin for answer in answers}
    own = sum(answer.origin.own_bytes for answer in answers)
    return own + sum(prompt.shared_bytes for prompt in prompts.values())
