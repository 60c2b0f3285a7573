"""How a token is chosen from a model's logits."""

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
class Sampling:
    """How tokens are chosen.

    Args:
        temperature: the logits are divided by it; 0 chooses the likeliest token.
        top_k: choose among the k likeliest tokens; 0: among all.
        top_p: choose among the fewest likeliest tokens whose probabilities sum to at least this.
        min_p: choose among tokens at least this times as probable as the likeliest.
        seed: of random numbers of its own; None: an arbitrary one.
        processors: change the logits first, in this order.

    Raises:
        SpecError: a number out of its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    processors: Sequence[Processor] = ()

    def __post_init__(self) -> None:
        for name, value, low, high in (
            ("temperature", self.temperature, 0, math.inf),
            ("top_k", self.top_k, 0, math.inf),
            ("top_p", self.top_p, 0, 1),
            ("min_p", self.min_p, 0, 1),
        ):
            if not low <= value <= high:
                raise SpecError(f"{name} is {value}; give a number from {low} to {high}")


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """The probabilities that tokens are drawn with, float32 (B, V), from logits (B, V), at a
    temperature above 0. As in transformers, temperature, top_k, top_p and min_p apply in this
    order, and the likeliest token always stays."""
    x = logits.float() / sampling.temperature
    if 0 < sampling.top_k < x.shape[-1]:
        x = x.masked_fill(x < x.topk(sampling.top_k).values[:, -1:], -math.inf)
    if sampling.top_p < 1:
        sorted_, order = x.softmax(dim=-1).sort(dim=-1, descending=True)
        before = sorted_.cumsum(dim=-1) - sorted_
        beyond = before >= sampling.top_p
        beyond[:, 0] = False
        x = x.masked_fill(beyond.scatter(1, order, beyond), -math.inf)
    p = x.softmax(dim=-1)
    if sampling.min_p:
        p = p.masked_fill(p < sampling.min_p * p.amax(dim=-1, keepdim=True), 0)
        p = p / p.sum(dim=-1, keepdim=True)
    return p


def likeliest(logits: Tensor) -> Tensor:
    """The token of the largest logit, the first among equals, int64 (B, 1), from logits (B, V)."""
    if not logits.is_cpu:
        return logits.argmax(dim=-1, keepdim=True)
    # On the CPU numpy takes a tenth of the time of torch, and more so in half precision.
    return torch.from_numpy(logits.detach().float().numpy().argmax(axis=-1))[:, None]


def drawn(logits: Tensor, sampling: Sampling, generator: torch.Generator | None = None) -> Tensor:
    """The next token, int64 (B, 1), from logits (B, V)."""
    if not sampling.temperature > 0:
        return likeliest(logits)
    return probabilities(logits, sampling).multinomial(1, generator=generator)


def penalty(prompt: int, *, presence: float = 0.0, frequency: float = 0.0) -> Processor:
    """A processor that lowers the logits of tokens that the answer has already, as OpenAI defines
    it: by `presence`, and by `frequency` for each time.

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
    """A processor that adds numbers to the logits of tokens."""
    tokens, values = torch.tensor(list(added)), torch.tensor(list(added.values()))

    def biased(ids: Tensor, logits: Tensor) -> Tensor:
        return logits.float().index_add(-1, tokens.to(ids.device), values.to(ids.device)[None])

    return biased


def repetition(penalty: float) -> Processor:
    """A processor that divides positive logits of tokens that the text has already, and multiplies
    negative ones, by `penalty`, as transformers does."""

    def lowered(ids: Tensor, logits: Tensor) -> Tensor:
        had = logits.gather(1, ids)
        return logits.scatter(1, ids, torch.where(had < 0, had * penalty, had / penalty))

    return lowered
