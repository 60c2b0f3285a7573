"""Answers to a prompt through a cache, and how right they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvkeep.generate import Batch, SamplingParams
from kvkeep.generate.reuse import Given
from kvkeep.host import ModelCache, host_of
from kvkeep.host.compress import compresses, read
from kvkeep_lab.evals.prompts import Prompt


@dataclass(frozen=True)
class Answer:
    """A model's answer, without the words that it was given, and its score from 0 to 1."""

    text: str
    score: float


@torch.inference_mode()
def answered(
    model: Any,
    tokenizer: Any,
    cache: ModelCache,
    prompt: Prompt,
    chunk: int | None,
    *,
    late: bool = False,
) -> Answer:
    """The greedy answer through an empty cache. It ends when no more text can change its score.
    `late`: the question is fed when the text has been read."""
    host = host_of(model)
    if late or compresses(cache):
        read(host, cache, prompt.ids[:, : prompt.text].to(host.device), chunk)
    ends = frozenset(host.end_tokens() | {tokenizer.eos_token_id})
    batch = Batch(model, sequences=1, chunk=chunk)
    params = SamplingParams(prompt.steps, end_tokens=ends)
    (answer,) = batch.add(prompt.ids, params, reuse=Given(model, cache))
    while not answer.ended:
        found = batch.step()
        if found and prompt.metric.settled(text_of(tokenizer, answer.tokens), prompt.answers):
            answer.cancel()
    if answer.error is not None:
        raise answer.error
    return scored(tokenizer, prompt, answer.tokens)


def scored(tokenizer: Any, prompt: Prompt, answer: Sequence[int]) -> Answer:
    """The answer of these tokens."""
    text = text_of(tokenizer, answer)
    return Answer(text, prompt.metric.score(text, prompt.answers))


def text_of(tokenizer: Any, answer: Sequence[int]) -> str:
    """The text of these tokens, without the end tokens."""
    text: str = tokenizer.decode(answer, skip_special_tokens=True)
    return text
