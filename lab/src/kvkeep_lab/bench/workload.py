"""Prompts that arrive over time, the loop that serves them, and the figures of the answers."""

from __future__ import annotations

import math
import random
import statistics
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from kvkeep.errors import KVKeepError
from kvkeep_lab.bench.options import LONGEST, SHORTEST
from kvkeep_lab.bench.text import tokens_of_text

_SKEW = 19 / 13
"""Exponent that gives 16 prompts between `SHORTEST` and `LONGEST` 11,000 tokens in all."""


class Request(NamedTuple):
    """A prompt, token ids (n,), and the second of the run in which it arrives."""

    ids: Tensor
    at: float = 0.0


@dataclass
class Served:
    """The answers to requests.

    Attributes:
        requests: in the order of the other lists.
        times: for each request, the second in which each of its tokens was there.
        tokens: the token ids of each; None: the system does not tell them.
        counts: how many tokens each has, if several may come at one time.
        bytes: of all caches, at the peak; None: unknown.
    """

    requests: Sequence[Request]
    times: list[list[float]]
    tokens: list[list[int]] | None = None
    counts: list[int] = field(default_factory=list)
    bytes: int | None = None

    def __post_init__(self) -> None:
        self.counts = self.counts or [len(times) for times in self.times]

    def require(self, new: int) -> Served:
        """Raise KVKeepError unless every request has `new` tokens; returns this."""
        if self.counts != [new] * len(self.requests) or not all(self.times):
            raise KVKeepError(
                f"answers of {self.counts} tokens instead of {new} each, which cannot be compared"
            )
        return self


def lengths(sequences: int, shortest: int = SHORTEST, longest: int = LONGEST) -> list[int]:
    """Lengths of prompts, more of them short than long, in a mixed order. Their mean is the same
    for any number of prompts: for the defaults 687.5."""
    places = [(index + 0.5) / sequences for index in range(sequences)]
    found = [shortest + round((longest - shortest) * place**_SKEW) for place in places]
    total = sequences * (shortest + (longest - shortest) * 13 / 32)
    found[-1] += round(total) - sum(found)
    random.Random(0).shuffle(found)
    return found


def prompts(tokenizer: Any, vocabulary: int, sizes: Sequence[int], shared: int = 0) -> list[Tensor]:
    """Stretches of real text that follow each other, each behind the first `shared` tokens of the
    text. Without a tokenizer they are random tokens.

    Args:
        vocabulary: how many tokens there are, for random ones.
        sizes: tokens of each, without the shared prefix.
    """
    count = shared + sum(sizes)
    if tokenizer is None:
        text = torch.randint(vocabulary, (count,), generator=torch.Generator().manual_seed(0))
    else:
        text = tokens_of_text(tokenizer, count)[0]
    prefix, *own = torch.split(text, [shared, *sizes])
    return [torch.cat([prefix, ids]) for ids in own]


def poisson(ids: Sequence[Tensor], rate: float) -> list[Request]:
    """Requests that arrive independently of each other, the first in second 0.

    Args:
        rate: requests per second.
    """
    draw, at, found = random.Random(0), 0.0, []
    for one in ids:
        found.append(Request(one, at))
        at += draw.expovariate(rate)
    return found


class Session(Protocol):
    """A system that computes one step of all its sequences at a time."""

    def add(self, index: int, ids: Tensor, new: int) -> None:
        """Take a prompt (n,), to be answered with `new` greedy tokens, without an end token."""

    def step(self) -> Sequence[tuple[int, int]]:
        """Take one step; the tokens it completed, each with the index of its prompt."""

    @property
    def busy(self) -> bool:
        """Whether an answer is incomplete."""

    def held(self) -> int:
        """Bytes that the caches hold; slots that sequences share count once."""


def serve(
    session: Session, requests: Sequence[Request], new: int, *, alone: bool = False
) -> Served:
    """Serve requests, which are in the order of their arrival; `alone`: one after the other. The
    clock stops while the caches' bytes are summed up, which is before each step that may end an
    answer."""
    times, tokens = [list[float]() for _ in requests], [list[int]() for _ in requests]
    coming, start, held = deque(enumerate(requests)), time.perf_counter(), 0
    while coming or session.busy:
        while coming and coming[0][1].at <= time.perf_counter() - start:
            if alone and session.busy:
                break
            index, request = coming.popleft()
            session.add(index, request.ids, new)
        if not session.busy:
            time.sleep(max(0.0, coming[0][1].at - (time.perf_counter() - start)))
            continue
        if any(len(mine) == new - 1 for mine in times):
            before = time.perf_counter()
            held = max(held, session.held())
            start += time.perf_counter() - before
        found = session.step()
        now = time.perf_counter() - start
        for index, token in found:
            times[index].append(now)
            tokens[index].append(token)
    return Served(requests, times, tokens, bytes=held).require(new)


def figures(served: Served) -> dict[str, float | None]:
    """Throughput, and the waiting time of each sequence.

    Returns:
        `tokens_per_s`, from the first arrival to the last token; `decode_tokens_per_s`, over the
        time in which every sequence has its first token and none its last, or, of sequences one
        after the other, over each one's time from its first to its last token; None if there is
        no such time; `ttft_p50_s` and `ttft_p95_s`, from a sequence's arrival to its first token;
        `gap_p95_s` and `gap_max_s`, between two tokens of a sequence, None for single tokens;
        `bytes`.
    """
    times = served.times
    first = [of[0] - request.at for of, request in zip(times, served.requests, strict=True)]
    last = max(of[-1] for of in times) - served.requests[0].at
    gaps = [after - before for of in times for before, after in pairwise(of)]
    return {
        "tokens_per_s": sum(served.counts) / last,
        "decode_tokens_per_s": _decode_rate(served),
        "ttft_p50_s": quantile(first, 0.5),
        "ttft_p95_s": quantile(first, 0.95),
        "gap_p95_s": quantile(gaps, 0.95) if gaps else None,
        "gap_max_s": max(gaps, default=None),
        "bytes": served.bytes,
    }


def _decode_rate(served: Served) -> float | None:
    begin, end = max(of[0] for of in served.times), min(of[-1] for of in served.times)
    spans, seconds = [(begin, end)] * len(served.times), end - begin
    if end <= begin:
        spans = [(of[0], of[-1]) for of in served.times]
        seconds = sum(last - first for first, last in spans)
        if any(last > first for (_, last), (first, _) in pairwise(sorted(spans))) or not seconds:
            return None
    tokens = 0.0
    for count, times, (first, last) in zip(served.counts, served.times, spans, strict=True):
        tokens += sum(first < at <= last for at in times) * count / len(times)
    return tokens / seconds


def quantile(values: Sequence[float], share: float) -> float:
    """The least of the values that at least `share` of them do not exceed."""
    ordered = sorted(values)
    return ordered[math.ceil(share * len(ordered)) - 1]


def agreement(served: Served, other: Served) -> float | None:
    """The share of tokens before the first that differs from the other's, of all answers."""
    if served.tokens is None or other.tokens is None:
        return None
    shares = []
    for mine, theirs in zip(served.tokens, other.tokens, strict=True):
        differing = [a != b for a, b in zip(mine, theirs, strict=True)]
        shares.append(differing.index(True) / len(mine) if True in differing else 1.0)
    return statistics.mean(shares)
