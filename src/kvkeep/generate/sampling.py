"""Sampling: the choice of a token from logits, and the limits of an answer."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvkeep.errors import SpecError

Processor = Callable[[Tensor, Tensor], Tensor]
"""Token ids (1, n) so far and logits (1, V) -> changed logits (1, V), as transformers' logits
processors."""


@dataclass(frozen=True)
class SamplingParams:
    """How to continue a prompt.

    Args:
        max_new_tokens: most tokens of the answer.
        temperature: divides the logits; 0 chooses the likeliest token.
        top_k: sample from the k likeliest tokens; 0: from all tokens.
        top_p: sample from the smallest set of likeliest tokens with at least this probability.
        min_p: sample from tokens with at least this share of the likeliest token's probability.
        seed: random seed of the answer; answer i of a prompt uses seed + i; None: arbitrary.
        processors: change the logits first, in this order.
        own_processors: functions that make a new processor for each answer; the processors may have
            state.
        stop: strings that end the answer; they are not part of its text.
        end_tokens: tokens that end the answer and are not part of its text; None: the model's end
            tokens.
        shown_tokens: special tokens to show in the text.
        logprobs: record each token's log probability, by the logits before processors and sampling.
        top_logprobs: also record the log probabilities of this many likeliest tokens.
        prompt_logprobs: record log probabilities of the prompt's tokens, too; the prompt is then
            computed, not read from a store.
        logprob_temperature: divides the logits of log probabilities.
        drafts: most draft tokens in a step. Drafts are found in the text; the model checks them in
            the forward of the answer's newest token, so a step may add several tokens. Up to
            rounding, drafts do not change the answer. 0: no drafts.
        priority: answers of higher priority are admitted first, and may preempt others.

    Raises:
        SpecError: a number is out of range.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    processors: Sequence[Processor] = ()
    own_processors: Sequence[Callable[[], Processor]] = ()
    stop: Sequence[str] = ()
    end_tokens: frozenset[int] | None = None
    shown_tokens: frozenset[int] = frozenset()
    logprobs: bool = False
    top_logprobs: int = 0
    prompt_logprobs: bool = False
    logprob_temperature: float = 1.0
    drafts: int = 0
    priority: int = 0

    def __post_init__(self) -> None:
        for name, low, high in (
            ("max_new_tokens", 1, math.inf),
            ("temperature", 0, math.inf),
            ("top_k", 0, math.inf),
            ("top_p", 0, 1),
            ("min_p", 0, 1),
            ("top_logprobs", 0, math.inf),
            ("drafts", 0, math.inf),
        ):
            value = getattr(self, name)
            if not low <= value <= high:
                raise SpecError(f"{name} is {value}; give a number from {low} to {high}")
        if not self.logprob_temperature > 0:
            raise SpecError(f"logprob_temperature is {self.logprob_temperature}; give more than 0")
        if isinstance(self.stop, str) or "" in self.stop:
            raise SpecError(f"stop is {self.stop!r}; give a list of strings that are not empty")


def probabilities(logits: Tensor, params: SamplingParams) -> Tensor:
    """Sampling probabilities, float32 (B, V), from logits (B, V), at a temperature above 0. As in
    transformers, temperature, top_k, top_p and min_p apply in this order, and the likeliest token
    always remains."""
    x = logits.float() / params.temperature
    if 0 < params.top_k < x.shape[-1]:
        x = x.masked_fill(x < x.topk(params.top_k).values[:, -1:], -math.inf)
    if params.top_p < 1:
        sorted_, order = x.softmax(dim=-1).sort(dim=-1, descending=True)
        before = sorted_.cumsum(dim=-1) - sorted_
        beyond = before >= params.top_p
        beyond[:, 0] = False
        x = x.masked_fill(beyond.scatter(1, order, beyond), -math.inf)
    p = x.softmax(dim=-1)
    if params.min_p:
        p = p.masked_fill(p < params.min_p * p.amax(dim=-1, keepdim=True), 0)
        p = p / p.sum(dim=-1, keepdim=True)
    return p


def likeliest(logits: Tensor) -> Tensor:
    """The token of the largest logit, the first of equal ones, int64 (B, 1), from logits (B, V)."""
    if not logits.is_cpu:
        return logits.argmax(dim=-1, keepdim=True)
    # On the CPU, numpy takes at most a tenth of torch's time; even less in half precision.
    return torch.from_numpy(logits.detach().float().numpy().argmax(axis=-1))[:, None]


def sample(
    logits: Tensor, params: SamplingParams, generator: torch.Generator | None = None
) -> Tensor:
    """The next token, int64 (B, 1), from logits (B, V)."""
    if not params.temperature > 0:
        return likeliest(logits)
    return probabilities(logits, params).multinomial(1, generator=generator)


def penalty(prompt: int, *, presence: float = 0.0, frequency: float = 0.0) -> Processor:
    """A processor of OpenAI's penalties: it lowers the logit of each token in the answer by
    `presence`, and by `frequency` times its count.

    Args:
        prompt: tokens of the prompt, which do not count.
    """

    def lowered(ids: Tensor, logits: Tensor) -> Tensor:
        answer = ids[0, prompt:]
        times = logits.new_zeros(logits.shape[-1], dtype=torch.float32)
        times.scatter_add_(0, answer, torch.ones_like(answer, dtype=torch.float32))
        return logits.float() - frequency * times - presence * (times > 0)

    return lowered


def bias(added: Mapping[int, float]) -> Processor:
    """A processor that adds a bias to the logit of each given token."""
    tokens, values = torch.tensor(list(added)), torch.tensor(list(added.values()))

    def biased(ids: Tensor, logits: Tensor) -> Tensor:
        return logits.float().index_add(-1, tokens.to(ids.device), values.to(ids.device)[None])

    return biased


def repetition(penalty: float) -> Processor:
    """A processor that penalises tokens of the text as in transformers: it divides positive and
    multiplies negative logits by `penalty`."""

    def lowered(ids: Tensor, logits: Tensor) -> Tensor:
        had = logits.gather(1, ids)
        return logits.scatter(1, ids, torch.where(had < 0, had * penalty, had / penalty))

    return lowered


def at_least(tokens: int, prompt: int, ends: Sequence[int]) -> Processor:
    """A processor that forbids end tokens until an answer has `tokens` tokens.

    Args:
        prompt: the number of tokens in the prompt.
        ends: the end tokens.
    """
    excluded = torch.tensor(ends, dtype=torch.int64)

    def going_on(ids: Tensor, logits: Tensor) -> Tensor:
        if ids.shape[1] - prompt >= tokens:
            return logits
        return logits.index_fill(-1, excluded.to(logits.device), -math.inf)

    return going_on
